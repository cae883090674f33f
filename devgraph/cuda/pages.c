/* Device memory that can be released and mapped again at the same addresses.

   torch's allocator holds its lock when it calls pages_allocate and pages_free, so no function may
   wait for Python. Addresses stay reserved for the lifetime of a segment of torch, while its memory
   may be released. The file is compiled on first use without CUDA's headers, so it looks up the
   functions of the driver by name. */

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* As in cuda.h of CUDA 10.2 and newer. */
typedef struct {
    int type, id;
} Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *security;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} Allocation;
typedef struct {
    Location location;
    int flags;
} Access;

enum { PINNED = 1, ON_DEVICE = 1, READ_AND_WRITE = 3, RELAXED = 2, NOT_FOUND = 500, NOT_SUPPORTED = 801 };
enum { VIRTUAL_MEMORY = 102 }; /* a device attribute */

static int (*Reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
static int (*AddressFree)(uint64_t, size_t);
static int (*Create)(uint64_t *, size_t, const Allocation *, unsigned long long);
static int (*Release)(uint64_t);
static int (*Map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
static int (*Unmap)(uint64_t, size_t);
static int (*SetAccess)(uint64_t, size_t, const Access *, size_t);
static int (*Granularity)(size_t *, const Allocation *, int);
static int (*ExchangeMode)(int *);
static int (*Attribute)(int *, int, int);
static int (*Info)(size_t *, size_t *);
static int (*Allocate)(uint64_t *, size_t);
static int (*Free)(uint64_t);

static const struct {
    const char *name;
    void *where;
} functions[] = {
    {"cuMemAddressReserve", &Reserve},
    {"cuMemAddressFree", &AddressFree},
    {"cuMemCreate", &Create},
    {"cuMemRelease", &Release},
    {"cuMemMap", &Map},
    {"cuMemUnmap", &Unmap},
    {"cuMemSetAccess", &SetAccess},
    {"cuMemGetAllocationGranularity", &Granularity},
    {"cuThreadExchangeStreamCaptureMode", &ExchangeMode},
    {"cuDeviceGetAttribute", &Attribute},
    {"cuMemGetInfo_v2", &Info},
    {"cuMemAlloc_v2", &Allocate},
    {"cuMemFree_v2", &Free},
};

typedef struct Segment {
    struct Segment *next;
    uint64_t address, handle; /* handle is 0 while the memory is released */
    size_t size;
    int device;
} Segment;

static Segment *segments;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Look up the driver's functions in a library; return 0 or a CUDA_ERROR. */
int pages_open(const char *library) {
    int maps = 0;
    void *driver = dlopen(library, RTLD_NOW);
    if (!driver)
        return NOT_FOUND;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!(*(void **)functions[i].where = dlsym(driver, functions[i].name)))
            return NOT_FOUND;
    int error = Attribute(&maps, VIRTUAL_MEMORY, 0); /* equal for all devices of a host */
    return error ? error : maps ? 0 : NOT_SUPPORTED;
}

static Allocation kind_of(int device) {
    Allocation kind = {.type = PINNED, .location = {ON_DEVICE, device}};
    return kind;
}

static int map(Segment *segment) {
    Allocation kind = kind_of(segment->device);
    Access access = {kind.location, READ_AND_WRITE};
    uint64_t handle;
    int error = Create(&handle, segment->size, &kind, 0);
    if (error)
        return error;
    error = Map(segment->address, segment->size, 0, handle, 0);
    if (error) {
        Release(handle);
        return error;
    }
    segment->handle = handle;
    return SetAccess(segment->address, segment->size, &access, 1);
}

static int unmap(Segment *segment) {
    if (!segment->handle)
        return 0;
    int error = Unmap(segment->address, segment->size);
    if (error)
        return error;
    error = Release(segment->handle);
    segment->handle = 0;
    return error;
}

static Segment **find(uint64_t address) {
    Segment **at = &segments;
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    return at;
}

static Segment *make(size_t size, int device) {
    Allocation kind = kind_of(device);
    size_t grain;
    if (Granularity(&grain, &kind, 0))
        return NULL;
    Segment *segment = calloc(1, sizeof *segment);
    if (!segment)
        return NULL;
    segment->size = (size + grain - 1) / grain * grain;
    segment->device = device;
    if (!Reserve(&segment->address, segment->size, 0, 0, 0)) {
        if (!map(segment))
            return segment;
        unmap(segment);
        AddressFree(segment->address, segment->size);
    }
    free(segment);
    return NULL;
}

/* Functions for torch, which raises its own error if the allocation returns NULL. */

void *pages_allocate(size_t size, int device, void *stream) {
    int mode = RELAXED; /* the calls must not invalidate a capture of this thread */
    (void)stream;
    ExchangeMode(&mode);
    Segment *segment = make(size, device);
    ExchangeMode(&mode);
    if (!segment)
        return NULL;
    pthread_mutex_lock(&lock);
    segment->next = segments;
    segments = segment;
    pthread_mutex_unlock(&lock);
    return (void *)(uintptr_t)segment->address;
}

void pages_free(void *pointer, size_t size, int device, void *stream) {
    int mode = RELAXED;
    (void)size, (void)device, (void)stream;
    pthread_mutex_lock(&lock);
    Segment **at = find((uint64_t)(uintptr_t)pointer), *segment = *at;
    if (segment)
        *at = segment->next;
    pthread_mutex_unlock(&lock);
    if (!segment)
        return;
    ExchangeMode(&mode);
    if (!unmap(segment))
        AddressFree(segment->address, segment->size);
    ExchangeMode(&mode);
    free(segment);
}

/* Functions for a pool, with the addresses of its segments, while the device is idle. Each returns
   the driver's first error, or 0. */

int pages_release(const uint64_t *addresses, size_t count) {
    int error = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
        Segment *segment = *find(addresses[i]);
        int failed = segment ? unmap(segment) : NOT_FOUND;
        error = error ? error : failed;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* The driver keeps the memory of destroyed executables until memory runs out, so request more memory
   than the device has free: its whole memory, of which the context already uses a part. */
void pages_trim(void) {
    size_t left, all;
    uint64_t got;
    if (!Info(&left, &all) && !Allocate(&got, all))
        Free(got);
}

/* Map the released segments. After an error, call pages_release. */
int pages_restore(const uint64_t *addresses, size_t count) {
    int error = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count && !error; i++) {
        Segment *segment = *find(addresses[i]);
        error = !segment ? NOT_FOUND : segment->handle ? 0 : map(segment);
    }
    pthread_mutex_unlock(&lock);
    return error;
}
