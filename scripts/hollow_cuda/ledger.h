/* Records the bytes that each process holds of each card: one page per card in the folder HOLLOW_LEDGER, shared by all
 * processes; a private page without it. values_memory.c writes it, nvml.c reads it. Exited processes hold nothing. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_CARDS 2
#define MOST_PROCESSES 256 /* so many fit on a page */
#define PAGE_BYTES 4096

typedef struct {
    int pid;
    unsigned long long used;
} Holder;

static const char *const UUIDS[MOST_CARDS] = {"GPU-11111111-2222-3333-4444-555555555555",
                                              "GPU-22222222-2222-3333-4444-555555555555"};

static Holder *holders(int card) {
    static Holder *pages[MOST_CARDS];
    if (!pages[card]) {
        char name[512];
        const char *folder = getenv("HOLLOW_LEDGER");
        snprintf(name, sizeof name, "%s/card-%d", folder ? folder : "", card);
        int file = folder ? open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
        if (folder && (file < 0 || ftruncate(file, PAGE_BYTES))) {
            perror(name);
            abort();
        }
        int how = folder ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
        pages[card] = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, how, file, 0);
        if (folder) {
            close(file);
        }
    }
    return pages[card];
}

/* A zombie holds nothing, as on a card. */
static int lives(int pid) {
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = pid ? fopen(path, "r") : NULL;
    if (!file) {
        return 0;
    }
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    char *end = size ? strrchr(text, ')') : NULL;
    return end && end[2] != 'Z' && end[2] != 'X';
}

/* The variable NAME_1 for card 1 (NAME_0 for card 0), else NAME, else the given default. */
static unsigned long long setting(const char *name, int card, unsigned long long otherwise) {
    char own[64];
    snprintf(own, sizeof own, "%s_%d", name, card);
    const char *text = getenv(own) ? getenv(own) : getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static unsigned long long capacity_of(int card) { return setting("HOLLOW_CAPACITY", card, 80ull << 30); }

/* Bytes held by all live processes, including their contexts, and by processes that are not listed (HOLLOW_OTHERS). */
static unsigned long long held(int card) {
    unsigned long long sum = setting("HOLLOW_OTHERS", card, 0);
    for (int i = 0; i < MOST_PROCESSES; i++) {
        if (lives(holders(card)[i].pid)) {
            sum += holders(card)[i].used;
        }
    }
    return sum;
}
