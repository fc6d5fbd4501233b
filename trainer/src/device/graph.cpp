// CUDA graphs of the work that libtorch enqueues, for `graph.rs`. This file is part of `libonefold_cuda.so`, which
// `trainer/cuda.sh` builds.
//
// Functions that can fail return null, or a message that `onefold_text_free` frees. No exception leaves this file.

#include <cstring>
#include <memory>
#include <optional>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

namespace {

struct Graph {
  at::cuda::CUDAGraph graph;
  // During a recording, the stream that was libtorch's current stream before.
  std::optional<c10::cuda::CUDAStream> before;
};

// Returns the stream on which all graphs are recorded, so that libtorch creates its resources per stream only once.
c10::cuda::CUDAStream recording_stream(int device) {
  static const auto stream = c10::cuda::getStreamFromPool(false, static_cast<c10::DeviceIndex>(device));
  return stream;
}

// Makes work that the second stream enqueues from now on wait for the work of the first stream.
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

// Returns the version of this library's functions and of the libtorch that it was compiled for, which
// `cuda_library.rs` compares with its own.
const char* onefold_cuda_version() noexcept {
  return "1 for libtorch " TORCH_VERSION;
}

// Makes another stream libtorch's current stream in this thread, and starts recording the work that is enqueued
// there.
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

// Ends the recording, and restores libtorch's previous current stream.
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

// Enqueues the recorded work on libtorch's current stream.
char* onefold_graph_replay(void* graph) noexcept {
  return guarded([&] { static_cast<Graph*>(graph)->graph.replay(); });
}

void onefold_graph_free(void* graph) noexcept {
  const auto message = guarded([&] { delete static_cast<Graph*>(graph); });
  free(message);
}

}
