// Replays recorded kernel launches, for tests. Every thread of a block runs in a separate operating system thread;
// two blocks run at a time, in random order. The program is compiled with a sanitizer, which finds races and
// accesses outside of a kernel's buffers.
//
//     replay RECORDING SEED
//
// `replay.rs` writes the recording and documents its format. A launch must leave the recorded bytes in its buffers.

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "host.cpp"

[[noreturn]] static void die(const std::string &message) {
    fprintf(stderr, "%s\n", message.c_str());
    exit(1);
}

class Reader {
  public:
    explicit Reader(const char *path) : file(path, std::ios::binary) {
        if (!file) die(std::string("cannot read ") + path);
    }

    bool ended() { return file.peek() == EOF; }

    template <class T>
    T number() {
        T value;
        bytes(&value, sizeof value);
        return value;
    }

    void bytes(void *target, size_t count) {
        file.read(static_cast<char *>(target), static_cast<std::streamsize>(count));
        if (!file) die("the recording ends early");
    }

  private:
    std::ifstream file;
};

// A buffer of a kernel, allocated with its exact size, so that the sanitizer detects accesses beside it.
struct Buffer {
    std::unique_ptr<char, decltype(&free)> memory{nullptr, free};
    std::vector<char> expected;
};

struct Launch {
    std::string kernel;
    i64 blocks;
    unsigned size;
    std::vector<Buffer> buffers;
    // The values of the arguments, as for `cuLaunchKernel`.
    std::vector<u64> values;
};

static Launch read_launch(Reader &from) {
    Launch launch;
    launch.kernel.resize(from.number<uint32_t>());
    from.bytes(launch.kernel.data(), launch.kernel.size());
    launch.blocks = from.number<i64>();
    launch.size = from.number<uint32_t>();
    launch.buffers.resize(from.number<uint32_t>());
    for (Buffer &buffer : launch.buffers) {
        size_t size = from.number<u64>();
        buffer.memory.reset(static_cast<char *>(malloc(size)));
        buffer.expected.resize(size);
        from.bytes(buffer.memory.get(), size);
        if (from.number<uint8_t>()) from.bytes(buffer.expected.data(), size);
        else buffer.expected.assign(buffer.memory.get(), buffer.memory.get() + size);
    }
    launch.values.resize(from.number<uint32_t>());
    for (u64 &value : launch.values) {
        int32_t buffer = from.number<int32_t>();
        value = from.number<u64>();
        if (buffer >= 0) value += reinterpret_cast<u64>(launch.buffers.at(static_cast<size_t>(buffer)).memory.get());
    }
    return launch;
}

// Threads that wait for launches. Only the begin and the end of a launch synchronize them, with two barriers. With
// a single barrier, the sanitizer would consider a thread that wakes up late from the begin as ordered after the
// threads that have already reached the end.
class Pool {
  public:
    explicit Pool(unsigned size) : size(size), work(2 * size) {
        for (auto *barrier : {&begin, &end}) pthread_barrier_init(barrier, nullptr, 2 * size + 1);
        for (auto &own : work) threads.emplace_back([this, &own] { serve(own); });
    }

    ~Pool() {
        ended = true;
        pthread_barrier_wait(&begin);
        for (auto &thread : threads) thread.join();
        for (auto *barrier : {&begin, &end}) pthread_barrier_destroy(barrier);
    }

    // Calls `kernel` in every thread of `blocks` blocks.
    void run(i64 blocks, std::function<void()> kernel, std::mt19937_64 &random) {
        body = std::move(kernel);
        std::vector<unsigned> order(static_cast<size_t>(blocks)), of(size);
        for (unsigned i = 0; i < order.size(); i++) order[i] = i;
        for (unsigned i = 0; i < size; i++) of[i] = i;
        std::shuffle(order.begin(), order.end(), random);
        for (size_t i = 0; i < order.size(); i++) {
            // Each half of the threads runs every second block.
            std::shuffle(of.begin(), of.end(), random);
            for (unsigned thread = 0; thread < size; thread++)
                work[i % 2 * size + of[thread]].push_back({order[i], thread});
        }
        pthread_barrier_wait(&begin);
        pthread_barrier_wait(&end);
    }

  private:
    struct Place {
        unsigned block, thread;
    };

    void serve(std::vector<Place> &own) {
        blockDim.x = size;
        for (;;) {
            pthread_barrier_wait(&begin);
            if (ended) return;
            for (auto [block, thread] : own) {
                blockIdx.x = block;
                threadIdx.x = thread;
                body();
            }
            own.clear();
            pthread_barrier_wait(&end);
        }
    }

    unsigned size;
    bool ended = false;
    std::function<void()> body;
    // The places that each thread runs.
    std::vector<std::vector<Place>> work;
    std::vector<std::thread> threads;
    pthread_barrier_t begin, end;
};

// Returns whether the launch leaves the recorded bytes.
static bool replay(const Launch &launch, int number, Pool &pool, std::mt19937_64 &random) {
    std::vector<void *> arguments;
    for (const u64 &value : launch.values) arguments.push_back(const_cast<u64 *>(&value));
    auto use = [&]<class... A>(void (*kernel)(A...)) {
        auto body = [&, kernel] { call(kernel, arguments.data(), std::index_sequence_for<A...>{}); };
        pool.run(launch.blocks, body, random);
    };
    if (!with_kernel(launch.kernel.c_str(), static_cast<int>(arguments.size()), use))
        die("there is no kernel " + launch.kernel + " of so many arguments");
    bool same = true;
    for (size_t i = 0; i < launch.buffers.size(); i++) {
        const Buffer &buffer = launch.buffers[i];
        auto [at, _] = std::mismatch(buffer.expected.begin(), buffer.expected.end(), buffer.memory.get());
        if (at == buffer.expected.end()) continue;
        fprintf(stderr, "launch %d, %s: byte %td of buffer %zu differs\n", number, launch.kernel.c_str(),
                at - buffer.expected.begin(), i);
        same = false;
    }
    return same;
}

int main(int count, char **arguments) {
    if (count != 3) die("usage: replay RECORDING SEED");
    Reader recording(arguments[1]);
    std::mt19937_64 random(strtoull(arguments[2], nullptr, 10));
    std::unique_ptr<Pool> pool;
    unsigned size = 0;
    int launches = 0;
    bool same = true;
    // A difference does not end the replay, because a later launch may show its cause.
    for (; !recording.ended(); launches++) {
        Launch launch = read_launch(recording);
        if (launch.size != size) pool = std::make_unique<Pool>(size = launch.size);
        same &= replay(launch, launches, *pool, random);
    }
    printf("%d\n", launches);
    return same ? 0 : 1;
}
