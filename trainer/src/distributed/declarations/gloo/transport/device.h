// Declares the classes that `ProcessGroupGloo.hpp` points to.
#pragma once

namespace gloo {
namespace transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

} // namespace transport
} // namespace gloo
