// Creates a ProcessGroupNCCL, which `c10d.cpp` then uses like any other process group. `trainer/cuda.sh` builds
// it as a separate library, because the program is linked only with libtorch's CPU part, and loads this library
// after `libtorch_cuda.so`.

#include <chrono>
#include <cstdint>
#include <cstring>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace {

char* text(const char* message) {
  char* copy = strdup(message);
  return copy != nullptr ? copy : strdup("out of memory");
}

} // namespace

// Connects the ranks of a job, each with its GPU `device`. Like `onefold_gloo_open`, returns null or a message
// that `onefold_text_free` frees, and stores an `intrusive_ptr<c10d::Backend>*` in `group`.
extern "C" char* onefold_nccl_open(void* store, int rank, int size, int device, int64_t timeout, void** group) {
  try {
    using Nccl = c10d::ProcessGroupNCCL;
    auto options = Nccl::Options::create();
    options->timeout = std::chrono::milliseconds(timeout);
    auto& shared = *static_cast<c10::intrusive_ptr<c10d::Store>*>(store);
    auto own_keys = c10::make_intrusive<c10d::PrefixStore>("nccl", shared);
    auto nccl = c10::make_intrusive<Nccl>(std::move(own_keys), rank, size, std::move(options));
    // Connects now, not in the first operation, so that the time limit for joining applies to a missing rank.
    at::Device own(at::kCUDA, static_cast<at::DeviceIndex>(device));
    nccl->setBoundDeviceId(own);
    nccl->eagerConnectSingleDevice(own);
    *group = new c10::intrusive_ptr<c10d::Backend>(std::move(nccl));
    return nullptr;
  } catch (const c10::Error& error) {
    return text(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return text(error.what());
  } catch (...) {
    return text("an exception of an unknown type");
  }
}
