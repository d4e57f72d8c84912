// Plays events read from stdin through the CUDA caching allocator of libc10_cuda.so, over the stand-in for libcudart.
//
//     replay CAPACITY TOTAL        bytes that cudaMalloc can give, and bytes of the card; settings: PYTORCH_ALLOC_CONF
//
//     malloc ID BYTES STREAM       {"region": 3, "offset": 512, ...} or {"oom": "CUDA out of memory. ...", ...}
//     free ID
//     record_stream ID STREAM
//     complete_events              the device has done all that it was given so far
//     empty_cache
//     fraction PERCENT             torch.cuda.set_per_process_memory_fraction
//     snapshot                     {"segments": [...], ...}, as torch.cuda.memory._snapshot() has them
//
// Answers with one line of JSON per event, and with one in front that names the numbers: every answer has "numbers",
// torch.cuda.memory_stats() after the event. A region is one cudaMalloc or one reservation of addresses.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <unistd.h>

#include <iostream>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" {
void standin_set_device_memory(int device, size_t capacity, size_t total);
void standin_hold_events();
void standin_complete_events();
size_t standin_region(const void* address);
unsigned long long standin_region_base(size_t region);
}

namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*ask)(DeviceIndex)); // in no header: libtorch_cuda.so calls it
}

namespace {

using c10::CachingAllocator::StatArray;
namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr c10::DeviceIndex kDevice = 0;

struct Numbers {
  std::vector<std::string> names;
  std::vector<int64_t> values;

  void add(const std::string& name, int64_t value) {
    names.push_back(name);
    values.push_back(value);
  }

  void add(const std::string& name, const c10::CachingAllocator::Stat& stat) {
    add(name + ".current", stat.current);
    add(name + ".peak", stat.peak);
    add(name + ".allocated", stat.allocated);
    add(name + ".freed", stat.freed);
  }

  // The order of StatType: aggregate, small pool, large pool.
  void add(const std::string& name, const StatArray& stats) {
    const char* pools[] = {".all", ".small_pool", ".large_pool"};
    for (size_t i = 0; i < 3; i++) {
      add(name + pools[i], stats[i]);
    }
  }
};

Numbers numbers() {
  const auto stats = allocator::getDeviceStats(kDevice);
  Numbers all;
  all.add("allocation", stats.allocation);
  all.add("segment", stats.segment);
  all.add("active", stats.active);
  all.add("inactive_split", stats.inactive_split);
  all.add("allocated_bytes", stats.allocated_bytes);
  all.add("reserved_bytes", stats.reserved_bytes);
  all.add("active_bytes", stats.active_bytes);
  all.add("inactive_split_bytes", stats.inactive_split_bytes);
  all.add("requested_bytes", stats.requested_bytes);
  all.add("oversize_allocations", stats.oversize_allocations);
  all.add("oversize_segments", stats.oversize_segments);
  all.add("num_alloc_retries", stats.num_alloc_retries);
  all.add("num_ooms", stats.num_ooms);
  all.add("num_oom_rejections", stats.num_oom_rejections);
  all.add("num_sync_all_streams", stats.num_sync_all_streams);
  all.add("num_device_alloc", stats.num_device_alloc);
  all.add("num_device_free", stats.num_device_free);
  all.add("max_split_size", stats.max_split_size);
  return all;
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (char character : text) {
    if (character == '\n') {
      json += "\\n";
    } else {
      if (character == '"' || character == '\\') {
        json += '\\';
      }
      json += character;
    }
  }
  return json + '"';
}

std::string place(const void* address) {
  const size_t region = standin_region(address);
  std::ostringstream json;
  json << "\"region\": " << region << ", \"offset\": "
       << reinterpret_cast<unsigned long long>(address) - standin_region_base(region);
  return json.str();
}

// What a function says of each item, separated by commas.
template <typename Items, typename Say>
std::string listed(const Items& items, Say say) {
  std::ostringstream json;
  const char* between = "";
  for (const auto& item : items) {
    json << between << say(item);
    between = ", ";
  }
  return json.str();
}

std::string block_json(const c10::CachingDeviceAllocator::BlockInfo& block) {
  const char* state = block.allocated ? "active_allocated" : block.active ? "active_pending_free" : "inactive";
  std::ostringstream json;
  json << "{\"size\": " << block.size << ", \"requested_size\": " << block.requested_size << ", \"state\": \"" << state
       << "\"}";
  return json.str();
}

std::string segment_json(const c10::CachingDeviceAllocator::SegmentInfo& segment) {
  std::ostringstream json;
  json << "{" << place(reinterpret_cast<void*>(segment.address)) << ", \"total_size\": " << segment.total_size
       << ", \"allocated_size\": " << segment.allocated_size << ", \"active_size\": " << segment.active_size
       << ", \"requested_size\": " << segment.requested_size
       << ", \"stream\": " << reinterpret_cast<uintptr_t>(segment.stream) / 16 << ", \"segment_type\": \""
       << (segment.is_large ? "large" : "small") << "\", \"is_expandable\": "
       << (segment.is_expandable ? "true" : "false") << ", \"blocks\": [" << listed(segment.blocks, block_json) << "]}";
  return json.str();
}

// Stream 0 is the default stream; the others are handles that nobody looks into (even, as real ones are).
cudaStream_t stream(uintptr_t number) {
  return reinterpret_cast<cudaStream_t>(number * 16);
}

class Replay {
 public:
  // What the event answers, as the inside of a JSON object.
  std::string play(std::istringstream& event) {
    std::string action;
    event >> action;
    if (action == "malloc") {
      return malloc(event);
    }
    if (action == "free") {
      free(event);
    } else if (action == "record_stream") {
      record_stream(event);
    } else if (action == "complete_events") {
      standin_complete_events();
    } else if (action == "empty_cache") {
      allocator::emptyCache();
    } else if (action == "fraction") {
      allocator::setMemoryFraction(number<double>(event) / 100, kDevice);
    } else if (action == "snapshot") {
      return "\"segments\": [" + listed(allocator::snapshot().segments, segment_json) + "]";
    } else {
      return "\"error\": " + quoted("no such event: " + action);
    }
    return "\"done\": true";
  }

 private:
  std::unordered_map<int64_t, void*> addresses_;

  template <typename T>
  static T number(std::istringstream& event) {
    T value{};
    event >> value;
    return value;
  }

  // An allocation that was refused is neither freed nor used: whoever writes the events need not know.
  void free(std::istringstream& event) {
    auto found = addresses_.find(number<int64_t>(event));
    if (found != addresses_.end()) {
      allocator::raw_delete(found->second);
      addresses_.erase(found);
    }
  }

  std::string malloc(std::istringstream& event) {
    const auto id = number<int64_t>(event);
    const auto bytes = number<size_t>(event);
    const auto on = number<uintptr_t>(event);
    TORCH_CHECK(bytes > 0, "nothing to allocate: of nothing the allocator gives a null pointer and counts nothing");
    try {
      void* address = allocator::raw_alloc_with_stream(bytes, stream(on));
      addresses_[id] = address;
      return place(address);
    } catch (const c10::OutOfMemoryError& error) {
      return "\"oom\": " + quoted(error.what_without_backtrace());  // what Python's exception says
    }
  }

  void record_stream(std::istringstream& event) {
    auto found = addresses_.find(number<int64_t>(event));
    if (found == addresses_.end()) {
      return;
    }
    void* address = found->second;
    const auto on = stream(number<uintptr_t>(event));
    c10::DataPtr tensor(address, address, allocator::get()->raw_deleter(), c10::Device(c10::kCUDA, kDevice));
    allocator::recordStream(tensor, c10::cuda::getStreamFromExternal(on, kDevice));
    tensor.release_context();
  }
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: replay CAPACITY TOTAL < events\n";
    return 2;
  }
  standin_hold_events();
  standin_set_device_memory(0, std::stoull(arguments[1]), std::stoull(arguments[2]));
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  allocator::init(1);
  c10::cuda::detail::init_p2p_access_cache(1);  // expandable segments look into it
  std::cout << "{\"names\": [" << listed(numbers().names, quoted) << "]}\n";
  Replay replay;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream event(line);
    std::string answer;
    try {
      answer = replay.play(event);
    } catch (const c10::Error& error) {
      answer = "\"error\": " + quoted(error.what_without_backtrace());
    }
    const auto values = listed(numbers().values, [](int64_t value) { return value; });
    std::cout << "{" << answer << ", \"numbers\": [" << values << "]}\n";
  }
  std::cout.flush();
  _exit(0);  // the allocator's own destructors are of no interest
}
