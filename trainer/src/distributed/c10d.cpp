// Functions of torch's c10d for `c10d.rs`: a TCPStore, a ProcessGroupGloo and its works. A ProcessGroupNCCL is
// created by `nccl.cpp`, and used through the same functions.
//
// A function that can fail returns null on success, or else a message that `onefold_text_free` frees. No
// exception leaves this file. Tensors are passed as `at::Tensor*`, as tch stores them. The caller owns the
// object behind an out parameter, and frees it with the function named `..._free`.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace {

using Milliseconds = std::chrono::milliseconds;
using StorePointer = c10::intrusive_ptr<c10d::Store>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
// Calls through the base class are virtual, so they need no definitions of Gloo's classes (see `declarations`).
using GroupPointer = c10::intrusive_ptr<c10d::Backend>;

char* text(const char* message) {
  char* copy = strdup(message);
  return copy != nullptr ? copy : strdup("out of memory");
}

template <typename Body>
char* guarded(Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return text(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return text(error.what());
  } catch (...) {
    return text("an exception of an unknown type");
  }
}

StorePointer& store_of(void* store) {
  return *static_cast<StorePointer*>(store);
}

at::Tensor& tensor_of(void* tensor) {
  return *static_cast<at::Tensor*>(tensor);
}

template <typename Options>
Options with_timeout(int64_t milliseconds) {
  Options options;
  options.timeout = Milliseconds(milliseconds);
  return options;
}

// Starts an operation and returns its work to the caller.
template <typename Start>
char* started(void* group, void** work, Start start) noexcept {
  return guarded([&] { *work = new WorkPointer(start(**static_cast<GroupPointer*>(group))); });
}

} // namespace

extern "C" {

void onefold_text_free(char* message) {
  free(message);
}

// Hosts a store on the listening socket `listener`, or connects to a store if `listener` is negative.
char* onefold_store_open(
    const char* host, uint16_t port, int listener, const char* prefix, int64_t timeout, void** store) {
  return guarded([&] {
    // c10d logs each lost connection with a stack trace, which would hide the errors that explain the loss.
    if (getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
      FLAGS_caffe2_log_level = std::max<int>(FLAGS_caffe2_log_level, c10::GLOG_FATAL);
    }
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = listener >= 0;
    if (listener >= 0) {
      options.masterListenFd = listener;
    }
    options.waitWorkers = false;
    options.timeout = Milliseconds(timeout);
    auto tcp = c10::make_intrusive<c10d::TCPStore>(host, options);
    *store = new StorePointer(c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(tcp)));
  });
}

void onefold_store_free(void* store) {
  free(guarded([&] { delete static_cast<StorePointer*>(store); }));
}

char* onefold_store_set(void* store, const char* key, const uint8_t* value, size_t length) {
  return guarded([&] { store_of(store)->set(key, std::vector<uint8_t>(value, value + length)); });
}

char* onefold_store_add(void* store, const char* key, int64_t amount, int64_t* sum) {
  return guarded([&] { *sum = store_of(store)->add(key, amount); });
}

// Sets `found` to whether the key has a value.
char* onefold_store_check(void* store, const char* key, int* found) {
  return guarded([&] { *found = store_of(store)->check({key}) ? 1 : 0; });
}

// Reads an existing value. The caller frees it with `onefold_text_free`.
char* onefold_store_get(void* store, const char* key, char** value, size_t* length) {
  return guarded([&] {
    auto bytes = store_of(store)->get(key);
    auto* copy = static_cast<char*>(malloc(bytes.size() + 1));
    if (copy == nullptr) {
      throw std::bad_alloc();
    }
    std::copy(bytes.begin(), bytes.end(), copy);
    *value = copy;
    *length = bytes.size();
  });
}

// Binds to the interface with the address `address`, or else to `interfaces` (names, separated by commas). If
// both are null, Gloo uses the interface of the host's name.
char* onefold_gloo_open(
    void* store,
    int rank,
    int size,
    const char* address,
    const char* interfaces,
    int threads,
    int64_t timeout,
    void** group) {
  return guarded([&] {
    using Gloo = c10d::ProcessGroupGloo;
    auto options = Gloo::Options::create(Milliseconds(timeout));
    if (address != nullptr) {
      options->devices.push_back(Gloo::createDeviceForHostname(address));
    } else if (interfaces != nullptr) {
      std::istringstream names(interfaces);
      for (std::string name; std::getline(names, name, ',');) {
        options->devices.push_back(Gloo::createDeviceForInterface(name));
      }
    } else {
      options->devices.push_back(Gloo::createDefaultDevice());
    }
    options->threads = threads;
    auto gloo = c10::make_intrusive<Gloo>(
        c10::make_intrusive<c10d::PrefixStore>("gloo", store_of(store)), rank, size, std::move(options));
    *group = new GroupPointer(std::move(gloo));
  });
}

// Aborts all works of a group on a device; other threads may wait for them.
void onefold_group_abort(void* group) {
  free(guarded([&] { (*static_cast<GroupPointer*>(group))->abort(); }));
}

// Shuts down a group whose works have ended.
void onefold_group_shut_down(void* group) {
  free(guarded([&] { (*static_cast<GroupPointer*>(group))->shutdown(); }));
}

void onefold_group_free(void* group) {
  free(guarded([&] { delete static_cast<GroupPointer*>(group); }));
}

char* onefold_group_all_to_all(
    void* group,
    void* received,
    const int64_t* received_splits,
    void* sent,
    const int64_t* sent_splits,
    size_t ranks,
    int64_t timeout,
    void** work) {
  return started(group, work, [&](c10d::Backend& backend) {
    std::vector<int64_t> out(received_splits, received_splits + ranks);
    std::vector<int64_t> in(sent_splits, sent_splits + ranks);
    return backend.alltoall_base(
        tensor_of(received), tensor_of(sent), out, in, with_timeout<c10d::AllToAllOptions>(timeout));
  });
}

// Sums.
char* onefold_group_all_reduce(void* group, void* tensor, int64_t timeout, void** work) {
  return started(group, work, [&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors{tensor_of(tensor)};
    return backend.allreduce(tensors, with_timeout<c10d::AllreduceOptions>(timeout));
  });
}

char* onefold_group_all_gather(void* group, void* gathered, void* tensor, int64_t timeout, void** work) {
  return started(group, work, [&](c10d::Backend& backend) {
    return backend._allgather_base(
        tensor_of(gathered), tensor_of(tensor), with_timeout<c10d::AllgatherOptions>(timeout));
  });
}

char* onefold_group_barrier(void* group, int64_t timeout, void** work) {
  return started(group, work, [&](c10d::Backend& backend) {
    return backend.barrier(with_timeout<c10d::BarrierOptions>(timeout));
  });
}

// Waits at most `patience` milliseconds, at least one. Sets `ended` to whether the work has ended; the message
// is the work's error.
char* onefold_work_wait(void* work, int64_t patience, int* ended) {
  *ended = 0;
  return guarded([&] {
    c10d::Work& waited = **static_cast<WorkPointer*>(work);
    if (!waited.isCompleted()) {
      try {
        waited.wait(Milliseconds(patience));
      } catch (...) {
        if (!waited.isCompleted()) {
          return;
        }
      }
    }
    *ended = 1;
    // Does not block any more; throws the work's own error.
    waited.wait();
  });
}

// On a device, makes all subsequently enqueued operations wait for the work; in main memory, waits for the
// work. The message is the work's error.
char* onefold_work_order(void* work) {
  return guarded([&] { (*static_cast<WorkPointer*>(work))->wait(); });
}

// Sets `ended` to whether the work has ended. The message is the work's error.
char* onefold_work_check(void* work, int* ended) {
  return guarded([&] {
    c10d::Work& checked = **static_cast<WorkPointer*>(work);
    *ended = checked.isCompleted() ? 1 : 0;
    if (auto error = checked.exception()) {
      std::rethrow_exception(error);
    }
  });
}

void onefold_work_free(void* work) {
  free(guarded([&] { delete static_cast<WorkPointer*>(work); }));
}

} // extern "C"
