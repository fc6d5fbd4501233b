// Functions of libtorch for `shim.rs`: an autograd node whose gradients Rust computes, a backward pass from a
// given gradient, replacing a gradient, steps of fused optimizers, and the flag that allows TF32.
//
// A function that can fail returns null on success, or else a message that `onefold_text_free` frees. No
// exception leaves this file. Tensors are passed as `at::Tensor*`, as tch stores them.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

namespace {

using torch::autograd::variable_list;

// Computes gradients. Takes ownership of `gradient`, and writes one tensor or null per input, which the caller
// owns. Returns false if it failed.
using Backward = bool (*)(void* state, at::Tensor* gradient, at::Tensor** gradients);
using Free = void (*)(void* state);

struct RustNode : public torch::autograd::Node {
  RustNode(void* state, size_t inputs, Backward backward, Free free)
      : state(state), inputs(inputs), backward(backward), free(free) {}

  ~RustNode() override {
    free(state);
  }

  std::string name() const override {
    return "OnefoldBackward";
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients.at(0).defined()) {
      return variable_list(inputs);
    }
    std::vector<at::Tensor*> found(inputs, nullptr);
    const bool succeeded = backward(state, new at::Tensor(std::move(gradients[0])), found.data());
    variable_list results;
    for (at::Tensor* tensor : found) {
      std::unique_ptr<at::Tensor> owned(tensor);
      results.push_back(owned ? std::move(*owned) : at::Tensor());
    }
    if (!succeeded) {
      throw std::runtime_error("a gradient could not be computed");
    }
    return results;
  }

  void* state;
  size_t inputs;
  Backward backward;
  Free free;
};

// Has the layout of `FusedOptimizer` in `shim.rs`.
struct FusedOptimizer {
  int32_t kind;
  double learning_rate, weight_decay, momentum, beta1, beta2, eps;
};

}  // namespace

extern "C" {

// Returns whether a function of these tensors is recorded: recording is enabled, and one of them requires a
// gradient.
bool onefold_is_recorded(at::Tensor* const* inputs, size_t count) noexcept {
  const auto has_gradient = [](const at::Tensor* tensor) { return tensor->requires_grad(); };
  return at::GradMode::is_enabled() && std::any_of(inputs, inputs + count, has_gradient);
}

// Makes `output` a function of `inputs`. Takes ownership of `state`, also if it fails.
char* onefold_attach(
    at::Tensor* output, at::Tensor* const* inputs, size_t count, void* state, Backward backward, Free free) noexcept {
  std::shared_ptr<RustNode> node;
  try {
    node = std::make_shared<RustNode>(state, count, backward, free);
  } catch (const std::exception& error) {
    free(state);
    return strdup(error.what());
  }
  try {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < count; i++) {
      tensors.push_back(*inputs[i]);
    }
    node->set_next_edges(torch::autograd::collect_next_edges(tensors));
    torch::autograd::set_history(*output, node);
    return nullptr;
  } catch (const std::exception& error) {
    return strdup(error.what());
  }
}

// Replaces the gradient of a leaf; null removes it.
char* onefold_set_gradient(at::Tensor* leaf, const at::Tensor* gradient) noexcept {
  try {
    leaf->mutable_grad() = gradient != nullptr ? *gradient : at::Tensor();
    return nullptr;
  } catch (const std::exception& error) {
    return strdup(error.what());
  }
}

// Runs a backward pass from `output`, whose gradient is `gradient`.
char* onefold_backward(const at::Tensor* output, const at::Tensor* gradient) noexcept {
  try {
    torch::autograd::backward({*output}, {*gradient});
    return nullptr;
  } catch (const std::exception& error) {
    return strdup(error.what());
  }
}

// Takes a step of an optimizer. `tensors` has `count` parameters, then `count` gradients, then `count` tensors
// per state. Gradients are first divided by `divisor`, if it is not null. If `refused` is not null and contains
// 1, nothing changes.
char* onefold_fused_step(
    const FusedOptimizer* optimizer, const at::Tensor* const* tensors, size_t count, const at::Tensor* steps,
    const at::Tensor* divisor, const at::Tensor* refused) noexcept {
  try {
    const at::NoGradGuard no_grad;
    const auto list = [&](size_t number) {
      std::vector<at::Tensor> found;
      for (size_t i = 0; i < count; i++) {
        found.push_back(*tensors[number * count + i]);
      }
      return found;
    };
    const auto optional = [](const at::Tensor* tensor) {
      return tensor != nullptr ? std::optional<at::Tensor>(*tensor) : std::nullopt;
    };
    const std::vector<at::Tensor> parameters = list(0), gradients = list(1), none{};
    const std::vector<at::Tensor> all_steps(count, *steps);
    const auto scale = optional(divisor), infinite = optional(refused);
    const FusedOptimizer& o = *optimizer;
    switch (o.kind) {
      case 0:
        at::_fused_adagrad_(
            parameters, gradients, list(2), all_steps, o.learning_rate, /*lr_decay=*/0.0, o.weight_decay, o.eps,
            /*maximize=*/false, scale, infinite);
        break;
      case 1:
        // Momentum starts with zeros, so the first step needs no special case.
        at::_fused_sgd_(
            parameters, gradients, o.momentum > 0.0 ? list(2) : none, o.weight_decay, o.momentum, o.learning_rate,
            /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false, /*is_first_step=*/false, scale, infinite);
        break;
      case 2:
        at::_fused_adam_(
            parameters, gradients, list(2), list(3), none, all_steps, o.learning_rate, o.beta1, o.beta2,
            o.weight_decay, o.eps, /*amsgrad=*/false, /*maximize=*/false, scale, infinite);
        break;
      default:
        at::_fused_adamw_(
            parameters, gradients, list(2), list(3), none, all_steps, o.learning_rate, o.beta1, o.beta2,
            o.weight_decay, o.eps, /*amsgrad=*/false, /*maximize=*/false, scale, infinite);
    }
    return nullptr;
  } catch (const std::exception& error) {
    return strdup(error.what());
  }
}

// Sets whether products of 32-bit floats on GPUs may use TF32.
char* onefold_allow_tf32(bool allowed) noexcept {
  try {
    at::globalContext().setFloat32MatmulPrecision(allowed ? "high" : "highest");
    return nullptr;
  } catch (const std::exception& error) {
    return strdup(error.what());
  }
}

// Returns whether products of 32-bit floats on GPUs may use TF32.
bool onefold_tf32_is_allowed() noexcept {
  try {
    return at::globalContext().allowTF32CuBLAS();
  } catch (const std::exception&) {
    return false;
  }
}

}
