// A fake CUDA driver on the CPU, for tests, with the functions that `cuda.rs` calls. Device memory is host memory,
// kernels run when they are launched, and copies happen as late as a driver may delay them: when they are waited
// for.

#include <cstdlib>
#include <functional>
#include <mutex>
#include <vector>

#include "host.cpp"

struct Stream {
    std::vector<std::function<void()>> work;
    size_t done = 0;

    void run(size_t until) {
        for (; done < until; done++) work[done]();
    }
};

struct Event {
    Stream *stream = nullptr;
    size_t until = 0;
};

static std::recursive_mutex mutex;
static Stream default_stream;
static thread_local void *current;
static int the_context;

static Stream *of(void *stream) { return stream ? static_cast<Stream *>(stream) : &default_stream; }

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, INVALID_CONTEXT = 201 };

#define CALL(name, ...) extern "C" int name(__VA_ARGS__)
#define LOCKED std::lock_guard<std::recursive_mutex> guard(mutex)
// Streams, events and memory belong to a context, which must be current.
#define IN_CONTEXT if (current != &the_context) return INVALID_CONTEXT; LOCKED

CALL(cuInit, unsigned) { return SUCCESS; }
CALL(cuDeviceGetCount, int *count) { *count = 1; return SUCCESS; }
CALL(cuDeviceGet, int *device, int number) { *device = number; return number ? INVALID_VALUE : SUCCESS; }
CALL(cuDeviceGetName, char *name, int size, int) { strncpy(name, "Fake GPU", size); return SUCCESS; }
CALL(cuDeviceTotalMem_v2, size_t *bytes, int) { *bytes = size_t(3) << 30; return SUCCESS; }
CALL(cuDeviceGetAttribute, int *value, int attribute, int) {
    // The compute capability is 9.0: attribute 75 is the major version.
    *value = attribute == 75 ? 9 : 0;
    return SUCCESS;
}
CALL(cuDevicePrimaryCtxRetain, void **context, int) { *context = &the_context; return SUCCESS; }
CALL(cuDevicePrimaryCtxRelease_v2, int) { return SUCCESS; }
CALL(cuCtxSetCurrent, void *context) { current = context; return SUCCESS; }
CALL(cuCtxGetCurrent, void **context) { *context = current; return SUCCESS; }
CALL(cuMemGetInfo_v2, size_t *free, size_t *total) {
    *free = size_t(2) << 30;
    *total = size_t(3) << 30;
    return SUCCESS;
}
CALL(cuGetErrorString, int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : "an error";
    return SUCCESS;
}
CALL(cuGetErrorName, int, const char **text) { *text = "CUDA_ERROR"; return SUCCESS; }

CALL(cuModuleLoadData, void **module, const void *image) {
    if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
    *module = &the_context;
    return SUCCESS;
}
CALL(cuModuleUnload, void *) { return SUCCESS; }
CALL(cuModuleGetFunction, void **function, void *, const char *name) { *function = strdup(name); return SUCCESS; }
CALL(cuLaunchKernel, void *function, unsigned blocks, unsigned y, unsigned z, unsigned size, unsigned, unsigned, unsigned,
     void *stream, void **arguments, void **) {
    IN_CONTEXT;
    if (y != 1 || z != 1 || stream) return INVALID_VALUE;
    return onefold_launch(static_cast<const char *>(function), blocks, size, arguments, -1, 0) ? SUCCESS : INVALID_VALUE;
}

CALL(cuStreamCreate, void **stream, unsigned flags) {
    IN_CONTEXT;
    // Only a non-blocking stream runs concurrently with the default stream.
    if (flags != 1) return INVALID_VALUE;
    *stream = new Stream;
    return SUCCESS;
}
CALL(cuStreamDestroy_v2, void *) { return SUCCESS; }
CALL(cuStreamSynchronize, void *stream) { IN_CONTEXT; of(stream)->run(of(stream)->work.size()); return SUCCESS; }
CALL(cuStreamWaitEvent, void *stream, void *event, unsigned) {
    IN_CONTEXT;
    auto *waited = static_cast<Event *>(event);
    // The default stream does not delay work, so the work that it waits for runs now. Other streams never have to
    // wait for the default stream.
    if (of(stream) == &default_stream && waited->stream) waited->stream->run(waited->until);
    return SUCCESS;
}
CALL(cuEventCreate, void **event, unsigned) { IN_CONTEXT; *event = new Event; return SUCCESS; }
CALL(cuEventDestroy_v2, void *) { return SUCCESS; }
CALL(cuEventRecord, void *event, void *stream) {
    IN_CONTEXT;
    *static_cast<Event *>(event) = {of(stream), of(stream)->work.size()};
    return SUCCESS;
}
CALL(cuEventSynchronize, void *event) {
    IN_CONTEXT;
    auto *waited = static_cast<Event *>(event);
    if (waited->stream) waited->stream->run(waited->until);
    return SUCCESS;
}
CALL(cuEventQuery, void *) { return SUCCESS; }
CALL(cuCtxSynchronize) { IN_CONTEXT; return SUCCESS; }

CALL(cuMemHostAlloc, void **memory, size_t bytes, unsigned) {
    IN_CONTEXT;
    *memory = bytes > size_t(1) << 30 ? nullptr : aligned_alloc(64, (bytes + 63) / 64 * 64);
    return *memory ? SUCCESS : OUT_OF_MEMORY;
}
CALL(cuMemFreeHost, void *memory) { free(memory); return SUCCESS; }
CALL(cuMemcpyHtoDAsync_v2, u64 target, const void *source, size_t bytes, void *stream) {
    IN_CONTEXT;
    of(stream)->work.push_back([=] { memcpy(reinterpret_cast<void *>(target), source, bytes); });
    return SUCCESS;
}
