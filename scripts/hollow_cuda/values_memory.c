/* The memory of the device that computes: host memory, mapped at the addresses that cudart_memory.c assigns. So copies
 * and fills are real, and the CPU can compute on the same bytes (values_kernels.py).
 *
 * Cards       There are HOLLOW_CARDS of them, 1 by default. This process's devices are those that CUDA_VISIBLE_DEVICES
 *             names, in its order, by number or by the beginning of a UUID. An unknown name ends the list, as in CUDA
 *             (CUDA C++ Programming Guide, "CUDA Environment Variables").
 * Context     HOLLOW_CONTEXT bytes, 300 MiB by default, of each process that allocates or queries memory.
 * Driver      With an older HOLLOW_DRIVER than the runtime, no device opens.
 */
#include "ledger.h"
#include <cuda_runtime_api.h>

#define FIRST_ADDRESS 0x100000000000ull
#define LAST_ADDRESS 0x500000000000ull
#define CONTEXT_BYTES (300ull << 20)

void standin_set_device_memory(int device, size_t capacity_bytes, size_t total_bytes);
int standin_answers(void *to, size_t size);

static int cards[MOST_CARDS], visible;

static void add_card(const char *name, int present) {
    for (int card = 0; card < present; card++) {
        int by_number = name[0] >= '0' && name[0] <= '9' && atoi(name) == card;
        if (by_number || (strlen(name) > 4 && !strncmp(UUIDS[card], name, strlen(name)))) {
            cards[visible++] = card;
            return;
        }
    }
}

static void see_cards(void) {
    int present = (int)setting("HOLLOW_CARDS", 0, 1);
    const char *named = getenv("CUDA_VISIBLE_DEVICES");
    if (!named) {
        for (; visible < present; visible++) {
            cards[visible] = visible;
        }
        return;
    }
    char *names = strdup(named), *rest = names, *name;
    for (int before = 0; visible < MOST_CARDS && (name = strsep(&rest, ",")); before = visible) {
        add_card(name, present);
        if (visible == before) {
            break;
        }
    }
    free(names);
}

__attribute__((constructor)) static void open_device(void) {
    void *memory = mmap((void *)FIRST_ADDRESS, LAST_ADDRESS - FIRST_ADDRESS, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory != (void *)FIRST_ADDRESS) {
        perror("the device's memory cannot be mapped");
        abort();
    }
    see_cards();
    for (int device = 0; device < visible; device++) {
        unsigned long long bytes = capacity_of(cards[device]);
        standin_set_device_memory(device, bytes, setting("HOLLOW_TOTAL", cards[device], bytes));
    }
}

static int driver_is_old(void) { return setting("HOLLOW_DRIVER", 0, CUDART_VERSION) < CUDART_VERSION; }

int standin_devices(void) { return driver_is_old() ? 0 : visible; }
int standin_expands(void) { return !getenv("HOLLOW_VGPU"); }
cudaError_t standin_why_none(void) { return driver_is_old() ? cudaErrorInsufficientDriver : cudaErrorNoDevice; }
int standin_card(int device) { return cards[device]; }

/* Makes another process hold so many bytes of a card from now on: process 1, which never exits. */
void standin_fill_card(int device, unsigned long long bytes) {
    holders(cards[device])[MOST_PROCESSES - 1] = (Holder){1, bytes};
}

static Holder *own(int device) {
    static Holder *slots[MOST_CARDS];
    static int pid;
    if (pid != getpid()) { /* a forked process does not share its parent's context */
        memset(slots, 0, sizeof slots);
        pid = getpid();
    }
    Holder *all = holders(cards[device]);
    for (int i = 0; i < MOST_PROCESSES - 1 && !slots[device]; i++) {
        int was = all[i].pid;
        if (!lives(was) && __sync_bool_compare_and_swap(&all[i].pid, was, pid)) {
            slots[device] = &all[i];
            all[i].used = setting("HOLLOW_CONTEXT", cards[device], CONTEXT_BYTES);
        }
    }
    if (!slots[device]) {
        abort();
    }
    return slots[device];
}

void standin_count(int device, long long more_bytes) { own(device)->used += more_bytes; }
size_t standin_used(int device) { return own(device), held(cards[device]); }

cudaError_t standin_copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    if (kind != cudaMemcpyHostToDevice && kind != cudaMemcpyDeviceToDevice && standin_answers(to, size)) {
        return cudaSuccess;
    }
    memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t standin_fill(void *to, int value, size_t size) { return memset(to, value, size), cudaSuccess; }
