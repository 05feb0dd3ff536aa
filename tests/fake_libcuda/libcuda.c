/* Fake of NVIDIA's driver library: as strict as the real one, for machines without a GPU.
 *
 * Includes NVIDIA's own cuda.h, so the compiler checks every prototype. Quoted sentences are from the comments of
 * cuda.h (version 13.1), or from the CUDA C++ Programming Guide where that is named.
 *
 * Memory of a device is a file without a name (memfd). At its device address nothing is mapped (PROT_NONE), so an
 * access by the host crashes; copies use a second mapping of the file, the shadow. No address is ever used twice, so an
 * access after a close crashes too. The last page of the file describes the memory to other processes.
 *
 * Errors of a program are recorded, not fatal: as violations (a GPU would fail or corrupt data) and as forbidden calls
 * (they would invalidate a CUDA graph capture of another thread). Functions `fake_…` are the control interface.
 */
#define _GNU_SOURCE
#include <cuda.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define MAX_ATTRIBUTES 256
#define MAX_DEPTH 64
#define PAGE ((size_t)4096)
#define GRANULARITY ((size_t)2 << 20)
#define POISON 0xA5
#define MAGIC 0x72666f726b475055ull
/* Bit of masks of handle types, next to those of CUmemAllocationHandleType. */
#define LEGACY_HANDLE 16

/* State ---------------------------------------------------------------------------------------------------------- */

/* Last page of each memory file. */
struct trailer {
    uint64_t magic, size;
    CUuuid uuid;
    int owner, legacy, freed;
};

/* Physical memory, of this process or of another one. */
struct memory {
    int descriptor, references, device; /* device: ordinal in this process; -1: not visible here */
    size_t size;
    char *shadow;
    struct trailer *trailer;
};

/* A range of device addresses, such as cuMemAddressReserve returns. */
struct range {
    CUdeviceptr base;
    size_t size;
    bool live, by_test;
    struct range *next;
};

enum mapping_type { ALLOCATED, OPENED, MAPPED }; /* by cuMemAlloc, cuIpcOpenMemHandle, cuMemMap */

struct mapping {
    enum mapping_type type;
    CUdeviceptr base;
    size_t size;
    struct memory *memory;
    struct range *range;
    int device, opens;           /* of OPENED: device of the context that opened it, and its reference count */
    ino_t inode;                 /* of OPENED */
    int access[MAX_DEVICES];     /* of MAPPED: flags for each device */
    struct generic *generic;     /* of MAPPED */
    bool live, by_test;
    struct mapping *next;
};

/* CUmemGenericAllocationHandle. */
struct generic {
    struct memory *memory;
    int references;
    bool by_test;
    struct generic *next;
};

/* Page-locked host memory. */
struct pinned {
    char *base;
    size_t size;
    bool registered, live;
    struct pinned *next;
};

struct CUevent_st {
    int device;
    uint64_t recorded, completed; /* numbers of cuEventRecord calls */
    bool live;
    struct CUevent_st *next;
};

enum operation_type { COPY, RECORD, WAIT, DROPPED };

struct operation {
    enum operation_type type;
    CUdeviceptr target, source;
    size_t length;
    char *staged; /* the driver's own copy of a pageable source */
    bool pageable_target;
    CUevent event;
    uint64_t number;
    struct operation *next;
};

struct CUstream_st {
    int device;
    bool live;
    struct operation *first, *last;
    struct CUstream_st *next;
};

struct CUctx_st {
    int device, retained;
};

struct text {
    struct text *next;
    char message[];
};

struct texts {
    struct text *first, *last;
    int count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int initialized_process;

static struct range *ranges;
static struct mapping *mappings;
static struct generic *generics;
static struct pinned *pinned_memory;
static struct CUevent_st *events;
static struct CUstream_st *streams, legacy_streams[MAX_DEVICES];
static struct CUctx_st contexts[MAX_DEVICES];
static CUresult sticky_errors[MAX_DEVICES];
static struct texts violations, forbidden_calls;
static long pageable_copies, completed_copies, copied_bytes, queued_copies, exports, flushes[MAX_DEVICES];

static struct {
    int devices, version, peer_access, capturing, paused, fail_copies, open_error, open_error_types, handle_types;
    int read_only, hidden_access, delay_us;
    uint64_t random;
    CUuuid uuids[MAX_DEVICES];
    int attributes[MAX_DEVICES][MAX_ATTRIBUTES];
    const char *log;
} settings;

static _Thread_local CUcontext stack[MAX_DEPTH];
static _Thread_local int depth;
static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static void unlock_at_return(int *unused) {
    (void)unused;
    pthread_mutex_unlock(&lock);
}
#define LOCKED() \
    pthread_mutex_lock(&lock); \
    __attribute__((cleanup(unlock_at_return), unused)) int locked_until_return = 0

/* A process that forks cannot use its parent's CUDA contexts, as with the real driver. */
#define ENTER() \
    if (__atomic_load_n(&initialized_process, __ATOMIC_ACQUIRE) != getpid()) return CUDA_ERROR_NOT_INITIALIZED; \
    LOCKED()
#define REQUIRE(condition, error) \
    if (!(condition)) return (error)
#define REQUIRE_CONTEXT() REQUIRE(depth > 0, CUDA_ERROR_INVALID_CONTEXT)

/* Records --------------------------------------------------------------------------------------------------------- */

static void record(struct texts *texts, const char *type, const char *format, va_list arguments) {
    struct text *text = calloc(1, sizeof *text + 256);
    vsnprintf(text->message, 256, format, arguments);
    *(texts->last ? &texts->last->next : &texts->first) = text;
    texts->last = text;
    texts->count++;
    if (!settings.log) return;
    char line[320];
    int length = snprintf(line, sizeof line, "%d %s %s\n", getpid(), type, text->message);
    int file = open(settings.log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || write(file, line, (size_t)length) != length) perror(settings.log);
    if (file >= 0) close(file);
}

__attribute__((format(printf, 1, 2))) static void violation(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    record(&violations, "violation", format, arguments);
    va_end(arguments);
}

__attribute__((format(printf, 1, 2))) static void forbidden(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    record(&forbidden_calls, "forbidden", format, arguments);
    va_end(arguments);
}

static const char *text_at(const struct texts *texts, int index) {
    for (struct text *text = texts->first; text; text = text->next)
        if (index-- == 0) return text->message;
    return NULL;
}

static void clear(struct texts *texts) {
    for (struct text *text = texts->first, *next; text; text = next) {
        next = text->next;
        free(text);
    }
    *texts = (struct texts){0};
}

/* "CU_STREAM_CAPTURE_MODE_GLOBAL: This is the default mode. […] if any other thread has a concurrent capture sequence
 * initiated with CU_STREAM_CAPTURE_MODE_GLOBAL, this thread is prohibited from potentially unsafe API calls."
 * Such a call also invalidates the capture of the other thread. */
static CUresult unsafe_call(const char *name) {
    if (!settings.capturing || capture_mode != CU_STREAM_CAPTURE_MODE_GLOBAL) return CUDA_SUCCESS;
    forbidden("%s while another thread captures in global mode", name);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
#define UNSAFE() \
    do { \
        CUresult unsafe_result = unsafe_call(__func__); \
        if (unsafe_result) return unsafe_result; \
    } while (0)

/* Memory ---------------------------------------------------------------------------------------------------------- */

static size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static int device_with_uuid(const CUuuid *uuid) {
    for (int device = 0; device < settings.devices; device++)
        if (!memcmp(&settings.uuids[device], uuid, sizeof *uuid)) return device;
    return -1;
}

/* Addresses that nothing else in this process uses, ever. */
static struct range *new_range(size_t size, bool by_test) {
    size_t total = size + GRANULARITY;
    void *start = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    struct range *range = calloc(1, sizeof *range);
    *range = (struct range){round_up((size_t)start, GRANULARITY), size, true, by_test, ranges};
    return ranges = range;
}

/* Takes over the descriptor. NULL if it is no memory of this fake. */
static struct memory *memory_of(int descriptor) {
    struct stat status;
    size_t total = fstat(descriptor, &status) ? 0 : (size_t)status.st_size;
    char *shadow = total > PAGE ? mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) : MAP_FAILED;
    if (shadow == MAP_FAILED) {
        close(descriptor);
        return NULL;
    }
    struct memory *memory = calloc(1, sizeof *memory);
    *memory = (struct memory){descriptor, 1, -1, total - PAGE, shadow, (struct trailer *)(shadow + total - PAGE)};
    memory->device = device_with_uuid(&memory->trailer->uuid);
    if (memory->trailer->magic == MAGIC) return memory;
    munmap(shadow, total);
    close(descriptor);
    free(memory);
    return NULL;
}

static struct memory *new_memory(size_t size, int device, bool legacy) {
    int descriptor = memfd_create("fake-gpu", MFD_CLOEXEC);
    struct trailer trailer = {MAGIC, size, settings.uuids[device], getpid(), legacy, 0};
    if (descriptor < 0 || ftruncate(descriptor, (off_t)(size + PAGE)) ||
        pwrite(descriptor, &trailer, sizeof trailer, (off_t)size) != sizeof trailer)
        return NULL;
    return memory_of(descriptor);
}

static void release(struct memory *memory) {
    if (--memory->references) return;
    munmap(memory->shadow, memory->size + PAGE);
    close(memory->descriptor);
    free(memory);
}

static struct mapping *new_mapping(enum mapping_type type, CUdeviceptr base, size_t size, struct memory *memory) {
    struct mapping *mapping = calloc(1, sizeof *mapping);
    *mapping = (struct mapping){.type = type, .base = base, .size = size, .memory = memory, .live = true};
    mapping->device = memory->device;
    mapping->next = mappings;
    return mappings = mapping;
}

static struct mapping *mapping_at(CUdeviceptr address) {
    for (struct mapping *mapping = mappings; mapping; mapping = mapping->next)
        if (mapping->live && mapping->base <= address && address - mapping->base < mapping->size) return mapping;
    return NULL;
}

static struct range *range_at(CUdeviceptr address) {
    for (struct range *range = ranges; range; range = range->next)
        if (range->base <= address && address - range->base < range->size) return range;
    return NULL;
}

static struct pinned *pinned_at(CUdeviceptr address) {
    for (struct pinned *one = pinned_memory; one; one = one->next)
        if (one->live && (CUdeviceptr)one->base <= address && address - (CUdeviceptr)one->base < one->size) return one;
    return NULL;
}

static bool overlaps(CUdeviceptr a, size_t a_size, CUdeviceptr b, size_t b_size) {
    return a < b + b_size && b < a + a_size;
}

/* Return the first queued copy that uses a range of addresses. */
static struct operation *queued_copy_in(CUdeviceptr base, size_t size) {
    for (struct CUstream_st *stream = streams; stream; stream = stream->next)
        for (struct operation *one = stream->first; one; one = one->next)
            if (one->type == COPY && (overlaps(base, size, one->target, one->length) ||
                                      (!one->staged && overlaps(base, size, one->source, one->length))))
                return one;
    return NULL;
}

/* "Calling cuMemFree on an exported memory region before calling cuIpcCloseMemHandle in the importing context will
 * result in undefined behavior", as does unmapping what a copy uses. */
static void check_unused(const char *name, CUdeviceptr base, size_t size) {
    if (queued_copy_in(base, size)) violation("%s of memory that a queued copy uses", name);
}

static void end_mapping(const char *name, struct mapping *mapping) {
    check_unused(name, mapping->base, mapping->size);
    mapping->live = false;
    release(mapping->memory);
    mapping->memory = NULL;
}

/* Copies ---------------------------------------------------------------------------------------------------------- */

struct span {
    char *pointer;
    size_t size;
};

/* Return the bytes at an address; records a violation and returns an empty span where a GPU would fail. */
static struct span span_at(CUdeviceptr address, int device, bool target) {
    const char *side = target ? "target" : "source";
    struct mapping *mapping = mapping_at(address);
    if (!mapping) {
        struct pinned *pinned = pinned_at(address);
        if (pinned) return (struct span){(char *)address, pinned->size - (size_t)((char *)address - pinned->base)};
        violation("copy by device %d: its %s %#llx is not mapped", device, side, address);
        return (struct span){0};
    }
    struct memory *memory = mapping->memory;
    bool has_access = mapping->type == ALLOCATED || (mapping->type == OPENED && mapping->device == device) ||
                      (mapping->type == MAPPED && (mapping->access[device] & CU_MEM_ACCESS_FLAGS_PROT_READ));
    if (__atomic_load_n(&memory->trailer->freed, __ATOMIC_ACQUIRE))
        violation("copy by device %d: its %s was freed by the process that owns it", device, side);
    else if (!has_access)
        violation("copy by device %d: it has no access to its %s", device, side);
    else if (target && mapping->type == MAPPED && mapping->access[device] != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        violation("copy by device %d: its target is mapped read-only", device);
    else if (target && memory->trailer->owner != getpid())
        violation("copy by device %d: its target is memory of another process", device);
    else
        return (struct span){memory->shadow + (address - mapping->base), mapping->size - (address - mapping->base)};
    return (struct span){0};
}

/* Copy through the shadows, in pieces, since a tensor may span several mappings. With a dry run, only check. */
static bool copy(const struct operation *one, int device, bool dry_run) {
    for (size_t offset = 0, size; offset < one->length; offset += size) {
        struct span source = one->staged ? (struct span){one->staged + offset, one->length - offset}
                                         : span_at(one->source + offset, device, false);
        struct span target = one->pageable_target ? (struct span){(char *)one->target + offset, one->length - offset}
                                                  : span_at(one->target + offset, device, true);
        if (!source.size || !target.size) return false;
        size = one->length - offset;
        if (source.size < size) size = source.size;
        if (target.size < size) size = target.size;
        if (!dry_run) memmove(target.pointer, source.pointer, size);
    }
    return true;
}

/* No more work runs on a device after such an error: its queued copies are dropped, and use no memory any more. */
static void fail_device(int device) {
    sticky_errors[device] = CUDA_ERROR_ILLEGAL_ADDRESS;
    for (struct CUstream_st *stream = streams; stream; stream = stream->next)
        for (struct operation *one = stream->device == device ? stream->first : NULL; one; one = one->next)
            if (one->type == COPY) {
                one->type = DROPPED;
                queued_copies--;
            }
}

static void run(struct CUstream_st *stream, struct operation *one) {
    if (one->type == RECORD && one->event->completed < one->number) one->event->completed = one->number;
    if (one->type != COPY) return;
    if (settings.fail_copies == 2 || !copy(one, stream->device, true) || !copy(one, stream->device, false)) {
        fail_device(stream->device);
        return;
    }
    queued_copies--;
    completed_copies++;
    copied_bytes += (long)one->length;
}

static uint64_t next_random(void) {
    settings.random += 0x9e3779b97f4a7c15ull;
    uint64_t value = settings.random;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

static bool is_runnable(const struct CUstream_st *stream) {
    const struct operation *one = stream->first;
    if (!one) return false;
    if (one->type == COPY) return !settings.paused;
    return one->type != WAIT || one->event->completed >= one->number;
}

/* Return a random stream whose first operation can run; NULL if there is none. */
static struct CUstream_st *random_stream(void) {
    struct CUstream_st *chosen = NULL;
    uint64_t count = 0;
    for (struct CUstream_st *stream = streams; stream; stream = stream->next)
        if (is_runnable(stream) && next_random() % ++count == 0) chosen = stream;
    return chosen;
}

/* Late, so that a program that does not wait for its copies reads poison. */
static void delay(void) {
    if (!settings.delay_us || next_random() % 16) return;
    struct timespec duration = {0, (long)(next_random() % (uint64_t)settings.delay_us) * 1000};
    pthread_mutex_unlock(&lock);
    nanosleep(&duration, NULL);
    pthread_mutex_lock(&lock);
}

/* The only thread that runs operations: in order within a stream, in random order among streams. */
static void *worker(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!random_stream()) pthread_cond_wait(&changed, &lock);
        delay();
        struct CUstream_st *stream = random_stream();
        if (!stream) continue;
        struct operation *one = stream->first;
        run(stream, one);
        stream->first = one->next;
        if (!stream->first) stream->last = NULL;
        free(one->staged);
        free(one);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static void queue(struct CUstream_st *stream, struct operation operation) {
    struct operation *one = malloc(sizeof *one);
    *one = operation;
    one->next = NULL;
    *(stream->last ? &stream->last->next : &stream->first) = one;
    stream->last = one;
    pthread_cond_broadcast(&changed);
}

/* Overwrite the target of a copy that has not run yet. Not where earlier copies still use these bytes: their order
 * within a stream makes that correct. */
static void poison(const struct operation *one, int device) {
    if (queued_copy_in(one->target, one->length)) return;
    if (!one->staged && overlaps(one->source, one->length, one->target, one->length)) return;
    for (size_t offset = 0, size; offset < one->length; offset += size) {
        struct span target = span_at(one->target + offset, device, true);
        size = target.size < one->length - offset ? target.size : one->length - offset;
        memset(target.pointer, POISON, size);
    }
}

/* Library, devices and contexts ----------------------------------------------------------------------------------- */

static int environment(const char *name, int standard) {
    const char *value = getenv(name);
    return value && *value ? atoi(value) : standard;
}

static void read_uuids(const char *text) {
    for (int device = 0; device < MAX_DEVICES; device++) {
        CUuuid *uuid = &settings.uuids[device];
        memset(uuid, 0, sizeof *uuid);
        memcpy(uuid->bytes, "fake-gpu", 8);
        uuid->bytes[15] = (char)device;
        for (int index = 0; text && index < 16; index++) {
            unsigned value;
            if (sscanf(text + 2 * index, "%2x", &value) == 1) uuid->bytes[index] = (char)value;
        }
        text = text ? strchr(text, ',') : NULL;
        if (text) text++;
    }
}

static void read_settings(void) {
    settings.devices = environment("FAKE_CUDA_DEVICES", 2);
    settings.version = environment("FAKE_CUDA_VERSION", 13010);
    settings.peer_access = environment("FAKE_CUDA_PEER_ACCESS", 1);
    settings.capturing = environment("FAKE_CUDA_CAPTURING", 0);
    settings.paused = environment("FAKE_CUDA_PAUSE_COPIES", 0);
    settings.fail_copies = environment("FAKE_CUDA_FAIL_COPIES", 0);
    settings.open_error = environment("FAKE_CUDA_OPEN_ERROR", 0);
    settings.open_error_types = environment("FAKE_CUDA_OPEN_ERROR_TYPES", 1 | 8 | LEGACY_HANDLE);
    settings.handle_types = environment("FAKE_CUDA_HANDLE_TYPES", CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    settings.read_only = environment("FAKE_CUDA_READ_ONLY", 0);
    settings.hidden_access = environment("FAKE_CUDA_HIDDEN_ACCESS", 0);
    settings.delay_us = environment("FAKE_CUDA_DELAY_US", 200);
    settings.random = (uint64_t)environment("FAKE_CUDA_SEED", 1);
    settings.log = getenv("FAKE_CUDA_LOG");
    read_uuids(getenv("FAKE_CUDA_UUIDS"));
    int ordering = environment("FAKE_CUDA_RDMA_ORDERING", CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES);
    for (int device = 0; device < MAX_DEVICES; device++) {
        int *attributes = settings.attributes[device];
        memset(attributes, 0, sizeof settings.attributes[device]);
        attributes[CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] = 1;
        attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 9;
        attributes[CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 1;
        attributes[CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED] = 1;
        attributes[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED] = 1;
        attributes[CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED] = environment("FAKE_CUDA_DMA_BUF", 1);
        attributes[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING] = ordering;
        attributes[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS] =
            environment("FAKE_CUDA_FLUSH_OPTIONS", CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST);
    }
}

static void initialize(void) {
    for (int device = 0; device < MAX_DEVICES; device++) {
        contexts[device].device = device;
        legacy_streams[device] = (struct CUstream_st){.device = device, .live = true, .next = streams};
        streams = &legacy_streams[device];
    }
    pthread_t thread;
    pthread_create(&thread, NULL, worker, NULL);
    pthread_detach(thread);
}

__attribute__((constructor)) static void load(void) { read_settings(); }

EXPORT CUresult CUDAAPI cuInit(unsigned int flags) {
    int process = __atomic_load_n(&initialized_process, __ATOMIC_ACQUIRE);
    /* Before the lock, which a thread of the parent process may have had when it forked. */
    REQUIRE(!process || process == getpid(), CUDA_ERROR_NOT_INITIALIZED);
    LOCKED();
    REQUIRE(!flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(settings.devices > 0, CUDA_ERROR_NO_DEVICE);
    if (initialized_process == getpid()) return CUDA_SUCCESS;
    initialize();
    __atomic_store_n(&initialized_process, getpid(), __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDriverGetVersion(int *version) {
    *version = settings.version;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    static const struct {
        CUresult error;
        const char *text;
    } known[] = {
        {CUDA_SUCCESS, "no error"},
        {CUDA_ERROR_INVALID_VALUE, "invalid argument"},
        {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
        {CUDA_ERROR_NOT_INITIALIZED, "initialization error"},
        {CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"},
        {CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"},
        {CUDA_ERROR_INVALID_CONTEXT, "invalid device context"},
        {CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"},
        {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"},
        {CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"},
        {CUDA_ERROR_NOT_FOUND, "named symbol not found"},
        {CUDA_ERROR_NOT_READY, "device not ready"},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
        {CUDA_ERROR_TOO_MANY_PEERS, "peer mapping resources exhausted"},
        {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"},
        {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"},
        {CUDA_ERROR_NOT_PERMITTED, "operation not permitted"},
        {CUDA_ERROR_NOT_SUPPORTED, "operation not supported"},
        {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
        {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing stream"},
    };
    for (size_t index = 0; index < sizeof known / sizeof *known; index++)
        if (known[index].error == error) {
            *text = known[index].text;
            return CUDA_SUCCESS;
        }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

static bool is_device(int device) { return device >= 0 && device < settings.devices; }

EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    REQUIRE(is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDeviceGetCount(int *count) {
    ENTER();
    *count = settings.devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER();
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    *uuid = settings.uuids[device];
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER();
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE((int)attribute > 0 && attribute < CU_DEVICE_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    *value = settings.attributes[device][attribute];
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDeviceCanAccessPeer(int *can_access, CUdevice device, CUdevice peer) {
    ENTER();
    REQUIRE(is_device(device) && is_device(peer), CUDA_ERROR_INVALID_DEVICE);
    *can_access = device != peer && settings.peer_access;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER();
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    contexts[device].retained++;
    *context = &contexts[device];
    return CUDA_SUCCESS;
}

static bool is_context(CUcontext context) {
    return context >= contexts && context < contexts + settings.devices && context->retained;
}

EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
    ENTER();
    REQUIRE(is_context(context) && depth < MAX_DEPTH, CUDA_ERROR_INVALID_CONTEXT);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context) {
    ENTER();
    REQUIRE_CONTEXT();
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) {
    ENTER();
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

static int current_device(void) { return stack[depth - 1]->device; }

/* Waits for the work of all streams, of a serving engine too: no library in its process may call it. "The API will
 * return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" during a capture, even in relaxed mode. */
EXPORT CUresult CUDAAPI cuCtxSynchronize(void) {
    ENTER();
    REQUIRE_CONTEXT();
    violation("cuCtxSynchronize waits for all streams of device %d", current_device());
    if (settings.capturing) forbidden("cuCtxSynchronize during a capture");
    return settings.capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

/* "Sets the calling thread's stream capture interaction mode to the value contained in *mode, and overwrites *mode with
 * the previous mode for the thread." */
EXPORT CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER();
    REQUIRE(mode && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* "Blocks until GPUDirect RDMA writes to the target context […] are visible to the specified scope." */
EXPORT CUresult CUDAAPI cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
                                                   CUflushGPUDirectRDMAWritesScope scope) {
    ENTER();
    REQUIRE_CONTEXT();
    REQUIRE(target == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER || scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES,
            CUDA_ERROR_INVALID_VALUE);
    int options = settings.attributes[current_device()][CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS];
    REQUIRE(options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST, CUDA_ERROR_NOT_SUPPORTED);
    flushes[current_device()]++;
    return CUDA_SUCCESS;
}

/* Allocations and handles ----------------------------------------------------------------------------------------- */

/* "Returns the base address in *pbase and size in *psize of the allocation that contains the input pointer": for
 * mapped memory this fake returns the complete reservation, a meaning that the documentation of
 * CU_POINTER_ATTRIBUTE_RANGE_SIZE contradicts; callers must use CU_POINTER_ATTRIBUTE_MAPPING_SIZE. */
EXPORT CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER();
    REQUIRE_CONTEXT();
    struct mapping *mapping = mapping_at(address);
    REQUIRE(mapping, CUDA_ERROR_NOT_FOUND);
    if (base) *base = mapping->range->base;
    if (size) *size = mapping->range->size;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER();
    REQUIRE_CONTEXT();
    struct mapping *mapping = mapping_at(address);
    REQUIRE(mapping, CUDA_ERROR_INVALID_VALUE);
    bool own_mapped = mapping->type == MAPPED;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = mapping->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)data = mapping->type == ALLOCATED; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = mapping->range->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = mapping->range->size; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)data = 1; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(uint64_t *)data = own_mapped ? (uint64_t)settings.handle_types : 0;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)data = mapping->size; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)data = mapping->base; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* Content of the 64 bytes of CUipcMemHandle and CUmemFabricHandle. */
struct shared_handle {
    uint64_t magic;
    int process, descriptor;
    uint64_t inode;
    int legacy;
};
_Static_assert(sizeof(struct shared_handle) <= CU_IPC_HANDLE_SIZE, "a handle has 64 bytes");

static void write_handle(void *handle, const struct memory *memory) {
    struct stat status;
    fstat(memory->descriptor, &status);
    struct shared_handle content = {MAGIC, getpid(), memory->descriptor, status.st_ino, memory->trailer->legacy};
    memset(handle, 0, CU_IPC_HANDLE_SIZE);
    memcpy(handle, &content, sizeof content);
}

/* Return a descriptor of a handle's memory; -1 if it was freed, or if its process has ended or is invisible. */
static int open_handle(const struct shared_handle *handle) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->process, handle->descriptor);
    /* Opening what another file's number names may block or have effects, so check it first. */
    if (stat(path, &status) || !S_ISREG(status.st_mode) || status.st_ino != handle->inode) return -1;
    return open(path, O_RDWR | O_CLOEXEC);
}

static CUresult open_error(int handle_type) {
    return settings.open_error_types & handle_type ? (CUresult)settings.open_error : CUDA_SUCCESS;
}

/* A device that CUDA_VISIBLE_DEVICES hides can be a peer; one that the container lacks cannot. */
static bool can_access(int device, int owner) {
    return owner == device || (settings.peer_access && (owner >= 0 || settings.hidden_access));
}

/* "Takes a pointer to the base of an existing device memory allocation created with cuMemAlloc" */
EXPORT CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER();
    REQUIRE_CONTEXT();
    struct mapping *mapping = mapping_at(address);
    REQUIRE(mapping && mapping->type == ALLOCATED && mapping->base == address, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(mapping->device == current_device(), CUDA_ERROR_INVALID_CONTEXT);
    write_handle(handle, mapping->memory);
    exports++;
    return CUDA_SUCCESS;
}

/* "Maps memory exported from another process": a handle of this process is an error. "Flags […] Must be specified as
 * CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS". "If the memory handle has already been opened by the current context, the
 * reference count on the handle is incremented by 1 and the existing device pointer is returned." */
EXPORT CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    ENTER();
    REQUIRE_CONTEXT();
    UNSAFE();
    struct shared_handle content;
    memcpy(&content, &handle, sizeof content);
    REQUIRE(!open_error(LEGACY_HANDLE), open_error(LEGACY_HANDLE));
    REQUIRE(flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS && content.magic == MAGIC && content.legacy,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(content.process != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    for (struct mapping *one = mappings; one; one = one->next)
        if (one->live && one->type == OPENED && one->inode == content.inode && one->device == current_device()) {
            one->opens++;
            *address = one->base;
            return CUDA_SUCCESS;
        }
    int descriptor = open_handle(&content);
    REQUIRE(descriptor >= 0, CUDA_ERROR_MAP_FAILED);
    struct memory *memory = memory_of(descriptor);
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    if (memory->trailer->freed || !can_access(current_device(), memory->device)) {
        bool is_missing = memory->device < 0 && !settings.hidden_access;
        CUresult error = memory->trailer->freed ? CUDA_ERROR_MAP_FAILED
                         : is_missing           ? CUDA_ERROR_INVALID_DEVICE
                                                : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        release(memory);
        return error;
    }
    struct range *range = new_range(memory->size, false);
    struct mapping *mapping = new_mapping(OPENED, range->base, range->size, memory);
    mapping->range = range;
    mapping->device = current_device();
    mapping->inode = content.inode;
    mapping->opens = 1;
    *address = mapping->base;
    return CUDA_SUCCESS;
}

/* "Decrements the reference count of the memory […] by 1. When the reference count reaches 0, this API unmaps the
 * memory." */
EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER();
    REQUIRE_CONTEXT();
    UNSAFE();
    struct mapping *mapping = mapping_at(address);
    REQUIRE(mapping && mapping->type == OPENED && mapping->base == address, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(mapping->device == current_device(), CUDA_ERROR_INVALID_CONTEXT);
    if (--mapping->opens) return CUDA_SUCCESS;
    mapping->range->live = false;
    end_mapping(__func__, mapping);
    return CUDA_SUCCESS;
}

static struct generic *new_generic(struct memory *memory, bool by_test) {
    struct generic *generic = calloc(1, sizeof *generic);
    *generic = (struct generic){memory, 1, by_test, generics};
    return generics = generic;
}

static struct generic *generic_of(CUmemGenericAllocationHandle handle) {
    for (struct generic *one = generics; one; one = one->next)
        if ((CUmemGenericAllocationHandle)one == handle && one->memory && one->references) return one;
    return NULL;
}

/* "The returned handle must be released with cuMemRelease." "The handle is guaranteed to be the same handle value used
 * to map the memory." */
EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER();
    struct mapping *mapping = mapping_at((CUdeviceptr)address);
    REQUIRE(mapping && mapping->type == MAPPED, CUDA_ERROR_INVALID_VALUE);
    if (!mapping->generic->references++) {
        mapping->generic->memory = mapping->memory;
        mapping->memory->references++;
    }
    *handle = (CUmemGenericAllocationHandle)mapping->generic;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER();
    struct generic *generic = generic_of(handle);
    REQUIRE(generic, CUDA_ERROR_INVALID_VALUE);
    if (--generic->references) return CUDA_SUCCESS;
    release(generic->memory);
    generic->memory = NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle,
                                                     CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER();
    struct generic *generic = generic_of(handle);
    REQUIRE(generic && !flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE((int)type & settings.handle_types, CUDA_ERROR_INVALID_VALUE);
    exports++;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        *(int *)shared = fcntl(generic->memory->descriptor, F_DUPFD_CLOEXEC, 0);
    else
        write_handle(shared, generic->memory);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                                       CUmemAllocationHandleType type) {
    ENTER();
    REQUIRE(!open_error((int)type), open_error((int)type));
    int descriptor = -1;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        descriptor = fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 0);
    } else {
        struct shared_handle content;
        REQUIRE(type == CU_MEM_HANDLE_TYPE_FABRIC && settings.handle_types & CU_MEM_HANDLE_TYPE_FABRIC,
                CUDA_ERROR_NOT_SUPPORTED);
        memcpy(&content, shared, sizeof content);
        if (content.magic == MAGIC && !content.legacy) descriptor = open_handle(&content);
    }
    REQUIRE(descriptor >= 0, CUDA_ERROR_INVALID_VALUE);
    struct memory *memory = memory_of(descriptor);
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    if (memory->trailer->legacy || (memory->device < 0 && !settings.hidden_access)) {
        CUresult error = memory->trailer->legacy ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
        release(memory);
        return error;
    }
    *handle = (CUmemGenericAllocationHandle)new_generic(memory, false);
    return CUDA_SUCCESS;
}

static bool is_granular(size_t size) { return size && size % GRANULARITY == 0; }

EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                            unsigned long long flags) {
    ENTER();
    (void)hint;
    UNSAFE();
    REQUIRE(is_granular(size) && alignment <= GRANULARITY && !(alignment & (alignment - 1)) && !flags,
            CUDA_ERROR_INVALID_VALUE);
    struct range *range = new_range(size, false);
    REQUIRE(range, CUDA_ERROR_OUT_OF_MEMORY);
    *address = range->base;
    return CUDA_SUCCESS;
}

/* "The size must match what was given to memAddressReserve and the ptr given must match what was returned" */
EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER();
    UNSAFE();
    struct range *range = range_at(address);
    REQUIRE(range && range->live && range->base == address && range->size == size, CUDA_ERROR_INVALID_VALUE);
    for (struct mapping *one = mappings; one; one = one->next)
        REQUIRE(!one->live || one->range != range, CUDA_ERROR_INVALID_VALUE);
    range->live = false;
    return CUDA_SUCCESS;
}

/* "Both ptr, size, and offset must be a multiple of the value given via cuMemGetAllocationGranularity"; the range must
 * be contained within a reservation; "offset […] currently must be zero". */
EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                 unsigned long long flags) {
    ENTER();
    UNSAFE();
    struct generic *generic = generic_of(handle);
    struct range *range = range_at(address);
    REQUIRE(generic && range && range->live && !offset && !flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_granular(size) && address % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(size <= generic->memory->size && size <= range->base + range->size - address, CUDA_ERROR_INVALID_VALUE);
    for (struct mapping *one = mappings; one; one = one->next)
        REQUIRE(!one->live || !overlaps(one->base, one->size, address, size), CUDA_ERROR_INVALID_VALUE);
    struct mapping *mapping = new_mapping(MAPPED, address, size, generic->memory);
    generic->memory->references++;
    mapping->generic = generic;
    mapping->range = range;
    mapping->by_test = generic->by_test;
    return CUDA_SUCCESS;
}

/* "The range must be the entire contiguous address range that was mapped to." */
EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER();
    UNSAFE();
    struct mapping *mapping = mapping_at(address);
    REQUIRE(mapping && mapping->type == MAPPED && mapping->base == address && mapping->size == size,
            CUDA_ERROR_INVALID_VALUE);
    end_mapping(__func__, mapping);
    return CUDA_SUCCESS;
}

/* "The range must be a fully mapped address range". Read-only access is refused unless allowed, as by some drivers. */
EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *descriptions,
                                       size_t count) {
    ENTER();
    UNSAFE();
    for (CUdeviceptr at = address; at < address + size;) {
        struct mapping *mapping = mapping_at(at);
        REQUIRE(mapping && mapping->type == MAPPED && mapping->base == at && at + mapping->size <= address + size,
                CUDA_ERROR_INVALID_VALUE);
        for (size_t index = 0; index < count; index++) {
            CUmemAccessDesc wanted = descriptions[index];
            REQUIRE(wanted.location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
            REQUIRE(is_device(wanted.location.id) && can_access(wanted.location.id, mapping->memory->device),
                    CUDA_ERROR_INVALID_DEVICE);
            REQUIRE(wanted.flags != CU_MEM_ACCESS_FLAGS_PROT_READ || settings.read_only, CUDA_ERROR_NOT_SUPPORTED);
            mapping->access[wanted.location.id] = (int)wanted.flags;
        }
        at += mapping->size;
    }
    return CUDA_SUCCESS;
}

/* Pinned memory --------------------------------------------------------------------------------------------------- */

static void new_pinned(void *base, size_t size, bool registered) {
    struct pinned *one = calloc(1, sizeof *one);
    *one = (struct pinned){base, size, registered, true, pinned_memory};
    pinned_memory = one;
}

EXPORT CUresult CUDAAPI cuMemHostAlloc(void **address, size_t size, unsigned int flags) {
    ENTER();
    REQUIRE_CONTEXT();
    UNSAFE();
    REQUIRE(size && flags <= 7, CUDA_ERROR_INVALID_VALUE);
    void *base = mmap(NULL, round_up(size, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(base != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    new_pinned(base, size, false);
    *address = base;
    return CUDA_SUCCESS;
}

static CUresult end_pinned(const char *name, void *address, bool registered, CUresult error) {
    struct pinned *one = pinned_at((CUdeviceptr)address);
    REQUIRE(one && one->base == address && one->registered == registered, error);
    check_unused(name, (CUdeviceptr)address, one->size);
    one->live = false;
    if (!registered) munmap(address, round_up(one->size, PAGE));
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemFreeHost(void *address) {
    ENTER();
    REQUIRE_CONTEXT();
    UNSAFE();
    return end_pinned(__func__, address, false, CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult CUDAAPI cuMemHostRegister(void *address, size_t size, unsigned int flags) {
    ENTER();
    REQUIRE_CONTEXT();
    UNSAFE();
    REQUIRE(address && size && flags <= 15 && !range_at((CUdeviceptr)address), CUDA_ERROR_INVALID_VALUE);
    for (struct pinned *one = pinned_memory; one; one = one->next)
        REQUIRE(!one->live || !overlaps((CUdeviceptr)one->base, one->size, (CUdeviceptr)address, size),
                CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    new_pinned(address, size, true);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemHostUnregister(void *address) {
    ENTER();
    REQUIRE_CONTEXT();
    UNSAFE();
    return end_pinned(__func__, address, true, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

/* Streams and events ---------------------------------------------------------------------------------------------- */

static bool is_legacy(CUstream stream) { return !stream || stream == CU_STREAM_LEGACY; }

/* Find a stream; NULL if the handle is invalid. */
static struct CUstream_st *stream_of(const char *name, CUstream handle) {
    if (is_legacy(handle) || handle == CU_STREAM_PER_THREAD) return &legacy_streams[current_device()];
    for (struct CUstream_st *one = streams; one; one = one->next)
        if (one == handle && one->live) return one;
    violation("%s with a stream that does not exist", name);
    return NULL;
}

static CUevent event_of(const char *name, CUevent handle) {
    for (struct CUevent_st *one = events; one; one = one->next)
        if (one == handle && one->live) return one;
    violation("%s with an event that does not exist", name);
    return NULL;
}

/* The legacy stream waits for all blocking streams, so its use during a capture is "a disallowed implicit dependency on
 * a current capture sequence", in any mode of the thread. */
static CUresult legacy_use(const char *name, CUstream stream) {
    if (!settings.capturing || !is_legacy(stream)) return CUDA_SUCCESS;
    violation("%s on the legacy stream during a capture", name);
    return capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : unsafe_call(name);
}

#define NOT_ON_LEGACY_STREAM(stream) \
    do { \
        CUresult legacy_result = legacy_use(__func__, (stream)); \
        if (legacy_result) return legacy_result; \
    } while (0)

EXPORT CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER();
    REQUIRE_CONTEXT();
    REQUIRE(flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *one = calloc(1, sizeof *one);
    *one = (struct CUstream_st){.device = current_device(), .live = true, .next = streams};
    *stream = streams = one;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamQuery(CUstream handle) {
    ENTER();
    REQUIRE_CONTEXT();
    NOT_ON_LEGACY_STREAM(handle);
    UNSAFE();
    struct CUstream_st *stream = stream_of(__func__, handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    if (sticky_errors[stream->device]) return sticky_errors[stream->device];
    return stream->first ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
    ENTER();
    REQUIRE_CONTEXT();
    NOT_ON_LEGACY_STREAM(handle);
    UNSAFE();
    struct CUstream_st *stream = stream_of(__func__, handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    while (stream->first && !sticky_errors[stream->device]) pthread_cond_wait(&changed, &lock);
    return sticky_errors[stream->device];
}

/* "In case the device is still doing work in the stream […] the resources associated with hStream will be released
 * automatically once the device has completed all work". */
EXPORT CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
    ENTER();
    REQUIRE_CONTEXT();
    REQUIRE(handle && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD, CUDA_ERROR_INVALID_HANDLE);
    struct CUstream_st *stream = stream_of(__func__, handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    stream->live = false;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags) {
    ENTER();
    REQUIRE_CONTEXT();
    NOT_ON_LEGACY_STREAM(handle);
    struct CUstream_st *stream = stream_of(__func__, handle);
    REQUIRE(stream && event_of(__func__, event), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!flags, CUDA_ERROR_INVALID_VALUE);
    queue(stream, (struct operation){.type = WAIT, .event = event, .number = event->recorded});
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER();
    REQUIRE_CONTEXT();
    REQUIRE(flags <= 7, CUDA_ERROR_INVALID_VALUE);
    struct CUevent_st *one = calloc(1, sizeof *one);
    *one = (struct CUevent_st){.device = current_device(), .live = true, .next = events};
    *event = events = one;
    return CUDA_SUCCESS;
}

/* "hEvent and hStream must be from the same context otherwise CUDA_ERROR_INVALID_HANDLE is returned." */
EXPORT CUresult CUDAAPI cuEventRecord(CUevent event, CUstream handle) {
    ENTER();
    REQUIRE_CONTEXT();
    NOT_ON_LEGACY_STREAM(handle);
    struct CUstream_st *stream = stream_of(__func__, handle);
    REQUIRE(stream && event_of(__func__, event) && event->device == stream->device, CUDA_ERROR_INVALID_HANDLE);
    queue(stream, (struct operation){.type = RECORD, .event = event, .number = ++event->recorded});
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuEventQuery(CUevent event) {
    ENTER();
    UNSAFE();
    REQUIRE(event_of(__func__, event), CUDA_ERROR_INVALID_HANDLE);
    if (sticky_errors[event->device]) return sticky_errors[event->device];
    return event->completed < event->recorded ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent event) {
    ENTER();
    REQUIRE_CONTEXT();
    UNSAFE();
    REQUIRE(event_of(__func__, event), CUDA_ERROR_INVALID_HANDLE);
    uint64_t wanted = event->recorded;
    while (event->completed < wanted && !sticky_errors[event->device]) pthread_cond_wait(&changed, &lock);
    return sticky_errors[event->device];
}

EXPORT CUresult CUDAAPI cuEventDestroy(CUevent event) {
    ENTER();
    REQUIRE_CONTEXT();
    REQUIRE(event_of(__func__, event), CUDA_ERROR_INVALID_HANDLE);
    event->live = false;
    return CUDA_SUCCESS;
}

static bool is_device_address(CUdeviceptr address) { return range_at(address) != NULL; }

/* A host address that is not page-locked is pageable: the driver stages such a source before it returns, and returns
 * only after a copy to such a target ("API synchronization behavior"). Programming Guide: "A memory copy will succeed
 * even if it is issued to a stream that is not associated to the current device." */
EXPORT CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t length, CUstream handle) {
    ENTER();
    REQUIRE_CONTEXT();
    NOT_ON_LEGACY_STREAM(handle);
    struct CUstream_st *stream = stream_of(__func__, handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    if (sticky_errors[stream->device]) return sticky_errors[stream->device];
    if (settings.fail_copies == 1) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!length) return CUDA_SUCCESS;
    struct operation one = {.type = COPY, .target = target, .source = source, .length = length};
    one.pageable_target = !is_device_address(target) && !pinned_at(target);
    bool pageable_source = !is_device_address(source) && !pinned_at(source);
    if (pageable_source) one.staged = memcpy(malloc(length), (void *)source, length);
    if (pageable_source || one.pageable_target) pageable_copies++;
    if (!copy(&one, stream->device, true)) {
        free(one.staged);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!one.pageable_target) poison(&one, stream->device);
    queued_copies++;
    queue(stream, one);
    while (one.pageable_target && stream->first) pthread_cond_wait(&changed, &lock);
    return sticky_errors[stream->device];
}

/* Control interface ----------------------------------------------------------------------------------------------- */

/* Memory of a test, as torch would allocate it: with pieces of 0 bytes by cuMemAlloc, otherwise in mapped pieces within
 * a reservation that is one piece longer. Returns 0 if there is no memory. */
EXPORT unsigned long long fake_allocate(size_t size, int device, size_t piece) {
    LOCKED();
    if (!size || !is_device(device) || piece % GRANULARITY) return 0;
    size_t total = round_up(size, piece ? piece : PAGE);
    struct range *range = new_range(total + piece, true);
    for (size_t offset = 0, unit = piece ? piece : total; range && offset < total; offset += unit) {
        struct memory *memory = new_memory(unit, device, !piece);
        if (!memory) return 0;
        struct mapping *one = new_mapping(piece ? MAPPED : ALLOCATED, range->base + offset, unit, memory);
        one->range = range;
        one->by_test = true;
        one->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        if (!piece) continue;
        one->generic = new_generic(memory, true);
        one->generic->references = 0; /* torch releases its handle once it has mapped the memory */
    }
    return range ? range->base : 0;
}

/* Free memory of fake_allocate; 0 if there is none at this address. */
EXPORT int fake_free(unsigned long long address) {
    LOCKED();
    struct range *range = range_at(address);
    if (!range || !range->live || !range->by_test || range->base != address) return 0;
    for (struct mapping *one = mappings; one; one = one->next) {
        if (!one->live || one->range != range) continue;
        if (one->type == ALLOCATED) __atomic_store_n(&one->memory->trailer->freed, 1, __ATOMIC_RELEASE);
        end_mapping("a free", one);
    }
    range->live = false;
    return 1;
}

/* Copy between device memory and the host through the shadow; 0 if some of it is not mapped. */
static int transfer(unsigned long long address, char *host, size_t length, bool to_device) {
    LOCKED();
    for (size_t offset = 0, size; offset < length; offset += size) {
        struct mapping *mapping = mapping_at(address + offset);
        if (!mapping) return 0;
        size_t start = (size_t)(address + offset - mapping->base);
        size = mapping->size - start < length - offset ? mapping->size - start : length - offset;
        char *device = mapping->memory->shadow + start;
        memcpy(to_device ? device : host + offset, to_device ? host + offset : device, size);
    }
    return 1;
}

EXPORT int fake_write(unsigned long long address, const char *bytes, size_t length) {
    return transfer(address, (char *)bytes, length, true);
}

EXPORT int fake_read(unsigned long long address, char *bytes, size_t length) {
    return transfer(address, bytes, length, false);
}

/* Device of an address, even if its memory was freed; -1 if it was never a device address. */
EXPORT int fake_device_of(unsigned long long address) {
    LOCKED();
    for (struct mapping *one = mappings; one; one = one->next)
        if (one->base <= address && address - one->base < one->size) return one->device;
    return -1;
}

#define SWITCH(name, field) \
    EXPORT void name(int value) { \
        LOCKED(); \
        settings.field = value; \
        pthread_cond_broadcast(&changed); \
    }
SWITCH(fake_set_devices, devices)
SWITCH(fake_set_version, version)
SWITCH(fake_set_peer_access, peer_access)
SWITCH(fake_set_capturing, capturing)
SWITCH(fake_set_paused, paused)
SWITCH(fake_set_handle_types, handle_types)
SWITCH(fake_set_read_only, read_only)
SWITCH(fake_set_hidden_access, hidden_access)
SWITCH(fake_set_delay_us, delay_us)

EXPORT void fake_set_seed(unsigned long long seed) {
    LOCKED();
    settings.random = seed;
}

EXPORT void fake_set_uuid(int device, const char *bytes) {
    LOCKED();
    memcpy(settings.uuids[device].bytes, bytes, sizeof(CUuuid));
}

EXPORT void fake_set_attribute(int device, int attribute, int value) {
    LOCKED();
    settings.attributes[device][attribute] = value;
}

/* Copies fail: 0 never, 1 when they are queued, 2 when they run (reported by the next query). */
EXPORT void fake_fail_copies(int when) {
    LOCKED();
    settings.fail_copies = when;
    if (!when) memset(sticky_errors, 0, sizeof sticky_errors);
}

/* Opening a handle fails with this code, for a mask of types: 1 descriptor, 8 fabric, 16 legacy. */
EXPORT void fake_fail_open(int code, int types) {
    LOCKED();
    settings.open_error = code;
    settings.open_error_types = types;
}

#define READER(type, name, value) \
    EXPORT type name { \
        LOCKED(); \
        return (value); \
    }
READER(int, fake_violation_count(void), violations.count)
READER(const char *, fake_violation(int index), text_at(&violations, index))
READER(int, fake_forbidden_call_count(void), forbidden_calls.count)
READER(const char *, fake_forbidden_call(int index), text_at(&forbidden_calls, index))
READER(long, fake_pageable_copies(void), pageable_copies)
READER(long, fake_completed_copies(void), completed_copies)
READER(long, fake_copied_bytes(void), copied_bytes)
READER(long, fake_queued_copies(void), queued_copies)
READER(long, fake_exports(void), exports)
READER(long, fake_flushes(int device), flushes[device])
READER(int, fake_contexts(int device), contexts[device].retained)

/* Depth of the calling thread's context stack, and its capture mode. */
EXPORT int fake_thread_depth(void) { return depth; }
EXPORT int fake_thread_capture_mode(void) { return (int)capture_mode; }

static int busy_streams(void) {
    int count = 0;
    for (const struct CUstream_st *stream = streams; stream; stream = stream->next) {
        const struct operation *one = stream->first;
        while (one && one->type != COPY) one = one->next;
        count += one != NULL;
    }
    return count;
}

/* Wait until copies are queued on at least `min` and at most `max` streams; 0 if that takes too long. */
EXPORT int fake_wait_busy_streams(int min, int max, int timeout_s) {
    LOCKED();
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += timeout_s;
    while (busy_streams() < min || busy_streams() > max)
        if (pthread_cond_timedwait(&changed, &lock, &deadline)) return 0;
    return 1;
}

#define COUNT(type, list, condition) \
    do { \
        for (const struct type *one = list; one; one = one->next) count += (condition) ? 1 : 0; \
    } while (0)

/* Number of resources of a type that the program has not released. */
EXPORT long fake_open_handles(const char *type) {
    LOCKED();
    long count = 0;
    if (!strcmp(type, "ipc"))
        for (const struct mapping *one = mappings; one; one = one->next)
            count += one->live && one->type == OPENED ? one->opens : 0;
    if (!strcmp(type, "memory"))
        for (const struct generic *one = generics; one; one = one->next) count += one->references;
    if (!strcmp(type, "mapping")) COUNT(mapping, mappings, one->live && one->type == MAPPED && !one->by_test);
    if (!strcmp(type, "reservation")) {
        COUNT(range, ranges, one->live && !one->by_test);
        for (const struct mapping *one = mappings; one; one = one->next) count -= one->live && one->type == OPENED;
    }
    if (!strcmp(type, "pinned")) COUNT(pinned, pinned_memory, one->live);
    if (!strcmp(type, "stream")) COUNT(CUstream_st, streams, one->live);
    if (!strcmp(type, "stream") && initialized_process) count -= MAX_DEVICES; /* the legacy streams */
    if (!strcmp(type, "event")) COUNT(CUevent_st, events, one->live);
    return count;
}

/* Forget all records and errors, and read the settings from the environment again. Memory, streams and contexts stay. */
EXPORT void fake_reset(void) {
    LOCKED();
    clear(&violations);
    clear(&forbidden_calls);
    memset(sticky_errors, 0, sizeof sticky_errors);
    memset(flushes, 0, sizeof flushes);
    pageable_copies = completed_copies = copied_bytes = exports = 0;
    read_settings();
    pthread_cond_broadcast(&changed);
}

/* Forget which contexts were retained; those that threads have on their stacks stay valid there. */
EXPORT void fake_forget_contexts(void) {
    LOCKED();
    for (int device = 0; device < MAX_DEVICES; device++) contexts[device].retained = 0;
}

#define CONSTANT(name) {#name, (long long)(name)}
#define SIZE(type) {"sizeof " #type, (long long)sizeof(type)}

/* Value of a constant of cuda.h, or the size of a type ("sizeof CUuuid"); -1 if it is not in this table. */
EXPORT long long fake_constant(const char *name) {
    static const struct {
        const char *name;
        long long value;
    } table[] = {
        SIZE(CUipcMemHandle), SIZE(CUmemAccessDesc), SIZE(CUmemLocation), SIZE(CUuuid), SIZE(CUmemFabricHandle),
        SIZE(CUdeviceptr), SIZE(CUmemGenericAllocationHandle), SIZE(CUcontext), SIZE(CUstream), SIZE(CUevent),
        SIZE(CUdevice), SIZE(CUresult),
        CONSTANT(CUDA_VERSION), CONSTANT(CU_IPC_HANDLE_SIZE),
        CONSTANT(CUDA_SUCCESS), CONSTANT(CUDA_ERROR_INVALID_VALUE), CONSTANT(CUDA_ERROR_OUT_OF_MEMORY),
        CONSTANT(CUDA_ERROR_NOT_INITIALIZED), CONSTANT(CUDA_ERROR_INVALID_DEVICE),
        CONSTANT(CUDA_ERROR_INVALID_CONTEXT), CONSTANT(CUDA_ERROR_MAP_FAILED),
        CONSTANT(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED), CONSTANT(CUDA_ERROR_INVALID_HANDLE),
        CONSTANT(CUDA_ERROR_NOT_FOUND), CONSTANT(CUDA_ERROR_NOT_READY), CONSTANT(CUDA_ERROR_ILLEGAL_ADDRESS),
        CONSTANT(CUDA_ERROR_TOO_MANY_PEERS), CONSTANT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
        CONSTANT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED), CONSTANT(CUDA_ERROR_NOT_PERMITTED),
        CONSTANT(CUDA_ERROR_NOT_SUPPORTED), CONSTANT(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
        CONSTANT(CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE), CONSTANT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        CONSTANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), CONSTANT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
        CONSTANT(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
        CONSTANT(CU_POINTER_ATTRIBUTE_MEMORY_TYPE), CONSTANT(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL),
        CONSTANT(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE), CONSTANT(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR),
        CONSTANT(CU_POINTER_ATTRIBUTE_RANGE_SIZE), CONSTANT(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES),
        CONSTANT(CU_POINTER_ATTRIBUTE_MAPPING_SIZE), CONSTANT(CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR),
        CONSTANT(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), CONSTANT(CU_MEM_HANDLE_TYPE_FABRIC),
        CONSTANT(CU_MEM_LOCATION_TYPE_DEVICE), CONSTANT(CU_MEM_ACCESS_FLAGS_PROT_READ),
        CONSTANT(CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
        CONSTANT(CU_STREAM_DEFAULT), CONSTANT(CU_STREAM_NON_BLOCKING),
        CONSTANT(CU_STREAM_CAPTURE_MODE_GLOBAL), CONSTANT(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
        CONSTANT(CU_STREAM_CAPTURE_MODE_RELAXED),
        CONSTANT(CU_EVENT_DEFAULT), CONSTANT(CU_EVENT_BLOCKING_SYNC), CONSTANT(CU_EVENT_DISABLE_TIMING),
        CONSTANT(CU_MEMHOSTALLOC_PORTABLE), CONSTANT(CU_MEMHOSTREGISTER_PORTABLE),
        CONSTANT(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING), CONSTANT(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        CONSTANT(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
        CONSTANT(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS),
        CONSTANT(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
        CONSTANT(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE), CONSTANT(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER),
        CONSTANT(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES),
        CONSTANT(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST), CONSTANT(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_MEMOPS),
        CONSTANT(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX),
        CONSTANT(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER), CONSTANT(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES),
    };
    for (size_t index = 0; index < sizeof table / sizeof *table; index++)
        if (!strcmp(table[index].name, name)) return table[index].value;
    return -1;
}
