// CUDA graphs of what libtorch enqueues, for `graph.rs`. It is a part of `libonefold_cuda.so`, which `trainer/cuda.sh` builds.
//
// A function that can fail returns null, or a message that `onefold_text_free` frees. No exception leaves this file.

#include <cstring>
#include <memory>
#include <optional>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAStream.h>

namespace {

struct Graph {
  at::cuda::CUDAGraph graph;
  // The stream that was libtorch's before, while something is recorded.
  std::optional<c10::cuda::CUDAStream> before;
};

// All graphs are recorded on one stream, so that what libtorch keeps by stream is made once.
c10::cuda::CUDAStream recording_stream(int device) {
  static const auto stream = c10::cuda::getStreamFromPool(false, static_cast<c10::DeviceIndex>(device));
  return stream;
}

// What the second stream enqueues from now on waits for what the first one has.
void order(c10::cuda::CUDAStream first, c10::cuda::CUDAStream second) {
  at::cuda::CUDAEvent done;
  done.record(first);
  done.block(second);
}

template <class Work>
char* guarded(Work work) noexcept {
  const char* message;
  try {
    work();
    return nullptr;
  } catch (const c10::Error& error) {
    message = strdup(error.what_without_backtrace());
  } catch (const std::exception& error) {
    message = strdup(error.what());
  } catch (...) {
    message = strdup("an exception of an unknown type");
  }
  return const_cast<char*>(message != nullptr ? message : strdup("out of memory"));
}

} // namespace

extern "C" {

// Makes another stream libtorch's in this thread, and begins to record what is enqueued there.
char* onefold_graph_begin(int device, void** graph) noexcept {
  return guarded([&] {
    auto own = std::make_unique<Graph>();
    const auto before = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
    const auto stream = recording_stream(device);
    order(before, stream);
    c10::cuda::setCurrentCUDAStream(stream);
    own->before = before;
    try {
      own->graph.capture_begin({0, 0}, cudaStreamCaptureModeRelaxed);
    } catch (...) {
      c10::cuda::setCurrentCUDAStream(before);
      throw;
    }
    *graph = own.release();
  });
}

// Ends the recording, and makes the stream that was before libtorch's again.
char* onefold_graph_end(void* graph) noexcept {
  return guarded([&] {
    auto& own = *static_cast<Graph*>(graph);
    const auto before = own.before.value();
    own.before.reset();
    struct Restore {
      c10::cuda::CUDAStream before;
      ~Restore() { c10::cuda::setCurrentCUDAStream(before); }
    } restore{before};
    own.graph.capture_end();
  });
}

// Enqueues what was recorded on libtorch's stream.
char* onefold_graph_replay(void* graph) noexcept {
  return guarded([&] { static_cast<Graph*>(graph)->graph.replay(); });
}

void onefold_graph_free(void* graph) noexcept {
  const auto message = guarded([&] { delete static_cast<Graph*>(graph); });
  free(message);
}

}
