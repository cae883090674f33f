/* A driver whose devices' memory is a few granules of the host's, for pages.c. */

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { GRANULE = 1 << 16, NO_MEMORY = 2, INVALID = 1, MOST = 64 };

static size_t room = MOST, reserved, sizes[MOST];
static int mode, handles, kept;

void driver_give(size_t granules) { room = granules; }
void driver_keep(void) { kept = 1; }
int driver_keeps(void) { return kept; }
size_t driver_room(void) { return room; }
size_t driver_reserved(void) { return reserved; }

int cuDeviceGetAttribute(int *value, int number, int device) {
    *value = number == 102 && device == 0;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *given) {
    int before = mode;
    mode = *given;
    *given = before;
    return 0;
}

int cuMemGetAllocationGranularity(size_t *size, const void *kind, int option) {
    *size = GRANULE;
    return kind && !option ? 0 : INVALID;
}

int cuMemGetInfo_v2(size_t *left, size_t *all) {
    *left = room * GRANULE;
    *all = MOST * GRANULE;
    return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    kept = 0;
    return address && size > room * GRANULE ? NO_MEMORY : INVALID;
}

int cuMemFree_v2(uint64_t address) { return INVALID; }

int cuMemAddressReserve(uint64_t *address, size_t size, size_t align, uint64_t at,
                        unsigned long long flags) {
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED || mode != 2 || align || at || flags)
        return INVALID;
    *address = (uint64_t)(uintptr_t)found;
    reserved += size;
    return 0;
}

int cuMemAddressFree(uint64_t address, size_t size) {
    reserved -= size;
    return munmap((void *)(uintptr_t)address, size) ? INVALID : 0;
}

int cuMemCreate(uint64_t *handle, size_t size, const int *kind, unsigned long long flags) {
    if (kind[0] != 1 || kind[2] != 1 || size % GRANULE || flags || handles + 1 == MOST)
        return INVALID;
    if (size / GRANULE > room)
        return NO_MEMORY;
    room -= size / GRANULE;
    sizes[*handle = ++handles] = size;
    return 0;
}

int cuMemRelease(uint64_t handle) {
    room += sizes[handle] / GRANULE;
    sizes[handle] = 0;
    return 0;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle,
             unsigned long long flags) {
    if (size != sizes[handle] || offset || flags)
        return INVALID;
    void *at = (void *)(uintptr_t)address;
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap(at, size, PROT_NONE, how, -1, 0) == at ? 0 : INVALID;
}

int cuMemSetAccess(uint64_t address, size_t size, const int *access, size_t count) {
    void *at = (void *)(uintptr_t)address;
    if (access[0] != 1 || access[2] != 3 || count != 1)
        return INVALID;
    if (mprotect(at, size, PROT_READ | PROT_WRITE))
        return INVALID;
    memset(at, 0xEE, size); /* nothing of what was there before */
    return 0;
}

int cuMemUnmap(uint64_t address, size_t size) {
    return mprotect((void *)(uintptr_t)address, size, PROT_NONE) ? INVALID : 0;
}
