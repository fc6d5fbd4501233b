// Declares the member of Gloo's context that an inline function of `ProcessGroupGloo.hpp` calls.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo
