// The kernels as C++ on the CPU, for tests. Threads run one after the other, forwards or backwards, which reveals a
// thread that needs the result of another. `replay.cpp` runs them concurrently.

#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

struct Index {
    unsigned x;
};
static thread_local Index blockIdx, blockDim, threadIdx;

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define __device__ inline
#define KERNEL static void
#include "kernels.cu"

template <class... A, size_t... I>
static void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}

// Runs all threads of a kernel; argument i is at `arguments[i]`, as for `cuLaunchKernel`.
template <class... A>
static void run(void (*kernel)(A...), i64 blocks, unsigned size, void **arguments, bool backwards) {
    blockDim.x = size;
    for (i64 block = 0; block < blocks; block++) {
        blockIdx.x = static_cast<unsigned>(backwards ? blocks - 1 - block : block);
        for (unsigned thread = 0; thread < size; thread++) {
            threadIdx.x = backwards ? size - 1 - thread : thread;
            call(kernel, arguments, std::index_sequence_for<A...>{});
        }
    }
}

// Calls `use` with the kernel of this name that takes `count` arguments (any number if negative). Returns whether
// it exists.
template <class Use>
static bool with_kernel(const char *name, int count, Use use) {
    auto arity = []<class... A>(void (*)(A...)) { return static_cast<int>(sizeof...(A)); };
#define TRY(kernel)                                                                     \
    if (!strcmp(name, #kernel)) {                                                       \
        if (count >= 0 && arity(kernel) != count) return false;                         \
        use(kernel);                                                                    \
        return true;                                                                    \
    }
    TRY(table_rows)
    TRY(gather)
    TRY(pool)
    TRY(first_rows)
    TRY(unpool)
    TRY(expand)
    TRY(fold)
    TRY(collect)
    TRY(spread)
    TRY(pad)
    TRY(unpad)
    TRY(sum_chunks)
    TRY(sum_rows)
    TRY(clip_rows)
    TRY(accumulate_rows)
    TRY(update)
    TRY(square_sums)
    TRY(add_up)
    TRY(judge)
    return false;
}

// Runs the kernel of this name. Returns whether a kernel with this name and number of arguments exists.
extern "C" int onefold_launch(const char *name, i64 blocks, unsigned size, void **arguments, int count, int backwards) {
    return with_kernel(name, count, [&](auto *kernel) { run(kernel, blocks, size, arguments, backwards != 0); });
}
