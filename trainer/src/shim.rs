//! Functions of libtorch that tch does not expose, called through `shim.cpp`: custom autograd functions, a
//! backward pass from a given gradient, replacing a gradient, steps of fused optimizers, and the permission for
//! TF32 products on GPUs.

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Kind, TchError, Tensor};
use torch_sys::C_tensor;

use crate::config::{DenseOptimizerConfig, DenseOptimizerKind};

/// Maps the gradient of an output to the gradients of the inputs; `None` for an input without a gradient.
type Backward = Box<dyn FnOnce(&Tensor) -> Vec<Option<Tensor>> + Send>;

unsafe extern "C" {
    fn onefold_is_recorded(inputs: *const *mut C_tensor, count: usize) -> bool;
    fn onefold_attach(
        output: *mut C_tensor,
        inputs: *const *mut C_tensor,
        count: usize,
        state: *mut c_void,
        backward: unsafe extern "C" fn(*mut c_void, *mut C_tensor, *mut *mut C_tensor) -> bool,
        free: unsafe extern "C" fn(*mut c_void),
    ) -> *mut c_char;
    fn onefold_set_gradient(leaf: *mut C_tensor, gradient: *const C_tensor) -> *mut c_char;
    fn onefold_backward(output: *const C_tensor, gradient: *const C_tensor) -> *mut c_char;
    fn onefold_fused_step(
        optimizer: *const FusedOptimizer,
        tensors: *const *const C_tensor,
        count: usize,
        steps: *const C_tensor,
        divisor: *const C_tensor,
        refused: *const C_tensor,
    ) -> *mut c_char;
    fn onefold_allow_tf32(allowed: bool) -> *mut c_char;
    #[cfg(test)]
    fn onefold_tf32_is_allowed() -> bool;
    fn onefold_text_free(message: *mut c_char);
}

/// The state of an autograd node. `backward` is taken when it is called, so that its captured tensors are freed
/// after the backward pass.
struct State {
    inputs: usize,
    backward: Option<Backward>,
}

/// Makes `output`, which was computed outside of autograd, a function of `inputs`. `backward` maps its gradient
/// to the gradients of `inputs`, in the same order. A graph supports one backward pass. If no input needs a
/// gradient, nothing is recorded.
///
/// # Panics
///
/// Panics if autograd rejects the tensor.
pub(crate) fn with_backward(
    mut output: Tensor,
    inputs: &[&Tensor],
    backward: impl FnOnce(&Tensor) -> Vec<Option<Tensor>> + Send + 'static,
) -> Tensor {
    let pointers: Vec<*mut C_tensor> = inputs.iter().map(|input| input.as_ptr().cast_mut()).collect();
    // Without gradients, or if no input requires one, autograd records nothing.
    // SAFETY: the pointers are of tensors that are alive.
    if !unsafe { onefold_is_recorded(pointers.as_ptr(), pointers.len()) } {
        return output;
    }
    let state = Box::new(State { inputs: inputs.len(), backward: Some(Box::new(backward)) });
    // SAFETY: the pointers are of tensors that are alive. The node owns the state from here on; it calls `call`
    // with the state during its lifetime, and `free` once at its end.
    let message = unsafe {
        onefold_attach(
            output.as_mut_ptr(),
            pointers.as_ptr(),
            pointers.len(),
            Box::into_raw(state).cast(),
            call,
            free,
        )
    };
    check(message);
    output
}

/// Replaces the gradient of a parameter. With `None`, the parameter has no gradient, so the next gradient is
/// stored without an addition.
pub(crate) fn set_gradient(parameter: &Tensor, gradient: Option<&Tensor>) {
    let gradient = gradient.map_or(std::ptr::null(), |gradient| gradient.as_ptr());
    // SAFETY: both are null or tensors that are alive. The parameter's handle does not change, only the tensor
    // behind it.
    check(unsafe { onefold_set_gradient(parameter.as_ptr().cast_mut(), gradient) });
}

/// Runs a backward pass from `output`, whose gradient is `gradient`, with the same shape.
///
/// # Panics
///
/// Panics if libtorch fails, like tch's own `backward`.
pub(crate) fn backward(output: &Tensor, gradient: &Tensor) {
    // SAFETY: both are tensors that are alive.
    check(unsafe { onefold_backward(output.as_ptr(), gradient.as_ptr()) });
}

/// The settings of one of libtorch's fused optimizers, with the memory layout that `shim.cpp` expects. Settings
/// that an algorithm does not have are ignored.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct FusedOptimizer {
    /// The algorithm: 0 is Adagrad, 1 SGD, 2 Adam, 3 AdamW.
    kind: i32,
    learning_rate: f64,
    weight_decay: f64,
    momentum: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
}

impl FusedOptimizer {
    /// Returns the optimizer that the configuration names, with this learning rate.
    pub(crate) fn new(config: &DenseOptimizerConfig, learning_rate: f64) -> Self {
        let kind = match config.kind {
            DenseOptimizerKind::Adagrad => 0,
            DenseOptimizerKind::Sgd => 1,
            DenseOptimizerKind::Adam => 2,
            DenseOptimizerKind::AdamW => 3,
        };
        let DenseOptimizerConfig { weight_decay, momentum, betas: [beta1, beta2], eps, .. } = *config;
        Self { kind, learning_rate, weight_decay, momentum, beta1, beta2, eps }
    }

    /// Returns the number of state tensors per parameter.
    fn states(&self) -> usize {
        match self.kind {
            0 => 1,
            1 => usize::from(self.momentum > 0.0),
            _ => 2,
        }
    }
}

/// The tensors of a fused step. Every list has one flat, contiguous `f32` tensor per parameter, in the same
/// order.
#[derive(Debug, Default)]
pub(crate) struct FusedTensors {
    pub(crate) parameters: Vec<Tensor>,
    /// The gradients. A step with a divisor divides them in place.
    pub(crate) gradients: Vec<Tensor>,
    /// One list per state of the optimizer; unused lists are empty.
    pub(crate) states: [Vec<Tensor>; 2],
}

/// Takes the step with number `steps`, counted from 1, in place. Gradients are first divided by `divisor`; if
/// `refused` is 1, nothing changes. Both are single floats on the device of the parameters.
pub(crate) fn fused_step(
    optimizer: &FusedOptimizer,
    steps: u64,
    tensors: &FusedTensors,
    divisor: Option<&Tensor>,
    refused: Option<&Tensor>,
) -> Result<(), TchError> {
    let FusedTensors { parameters, gradients, states } = tensors;
    let Some(first) = parameters.first() else { return Ok(()) };
    let count = parameters.len();
    let states = &states[..optimizer.states()];
    let lists = [parameters, gradients].into_iter().chain(states);
    let fits = |list: &Vec<Tensor>| {
        let mut pairs = list.iter().zip(parameters);
        let are_alike = |(tensor, parameter): (&Tensor, &Tensor)| {
            tensor.kind() == Kind::Float && tensor.is_contiguous() && tensor.size() == parameter.size()
        };
        list.len() == count && pairs.all(are_alike)
    };
    assert!(lists.clone().all(fits), "a tensor of its size for every parameter");
    let pointers: Vec<*const C_tensor> = lists.flatten().map(Tensor::as_ptr).collect();
    // The kernels read the step number from one tensor per parameter; all parameters share one tensor here.
    let steps = Tensor::f_full([0_i64; 0], steps as f64, (Kind::Float, first.device()))?;
    let pointer = |tensor: Option<&Tensor>| tensor.map_or(std::ptr::null(), Tensor::as_ptr);
    // SAFETY: all pointers are null or of tensors that are alive. `pointers` has `count` tensors each for the
    // parameters, for the gradients and for each of the optimizer's states, all of equal sizes.
    let message = unsafe {
        onefold_fused_step(
            optimizer,
            pointers.as_ptr(),
            count,
            steps.as_ptr(),
            pointer(divisor),
            pointer(refused),
        )
    };
    said(message).map_err(TchError::Torch)
}

/// Sets for the whole process whether products of 32-bit floats on GPUs may use TF32.
pub(crate) fn allow_tf32(allowed: bool) {
    // SAFETY: the call sets a flag of libtorch.
    check(unsafe { onefold_allow_tf32(allowed) });
}

/// Converts the return value of a C++ function to a result: null is success, anything else is a message.
pub(crate) fn said(message: *mut c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: a message that is not null is a C string owned by the caller, which frees it once.
    unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        onefold_text_free(message);
        Err(text)
    }
}

fn check(message: *mut c_char) {
    if let Err(text) = said(message) {
        panic!("libtorch: {text}");
    }
}

/// # Safety
///
/// `state` must be a [`State`] that is alive and has no other user. `gradient` must be a tensor whose ownership
/// passes to this function. `gradients` must have room for one pointer per input.
unsafe extern "C" fn call(
    state: *mut c_void,
    gradient: *mut C_tensor,
    gradients: *mut *mut C_tensor,
) -> bool {
    // SAFETY: as required from the caller.
    let (state, gradient) = unsafe { (&mut *state.cast::<State>(), Tensor::from_ptr(gradient)) };
    let Some(backward) = state.backward.take() else { return false };
    let Ok(found) = catch_unwind(AssertUnwindSafe(|| backward(&gradient))) else { return false };
    assert_eq!(found.len(), state.inputs, "a gradient for every input");
    for (i, tensor) in found.into_iter().enumerate() {
        let pointer = tensor.map_or(std::ptr::null_mut(), |mut tensor| {
            let pointer = tensor.as_mut_ptr();
            // The node takes ownership.
            std::mem::forget(tensor);
            pointer
        });
        // SAFETY: as required from the caller.
        unsafe { gradients.add(i).write(pointer) };
    }
    true
}

/// # Safety
///
/// `state` must be a [`State`] that has no other user and is not used afterwards.
unsafe extern "C" fn free(state: *mut c_void) {
    // SAFETY: as required from the caller; the state was created by `Box::into_raw`.
    drop(unsafe { Box::from_raw(state.cast::<State>()) });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(value: f32) -> Tensor {
        Tensor::from_slice(&[value]).set_requires_grad(true)
    }

    #[test]
    fn gradients_go_through_a_function_of_ours() {
        let (x, y) = (number(3.0), number(5.0));
        let constant = Tensor::from_slice(&[7.0_f32]);
        let product = x.detach() * y.detach() * &constant;
        let (of_x, of_y) = (y.detach() * &constant, x.detach() * &constant);
        let product = with_backward(product, &[&x, &constant, &y], move |gradient| {
            vec![Some(gradient * of_x), None, Some(gradient * of_y)]
        });
        (product * 2.0).backward();
        assert_eq!(x.grad().double_value(&[0]), 70.0);
        assert_eq!(y.grad().double_value(&[0]), 42.0);
        assert!(!constant.grad().defined());
    }

    #[test]
    fn failures_of_backward_are_errors() {
        let x = number(1.0);
        let output = with_backward(x.detach() * 2.0, &[&x], |_| panic!("no gradient"));
        let error = output.f_backward().unwrap_err();
        assert!(error.to_string().contains("a gradient could not be computed"), "{error}");
    }

    #[test]
    fn a_gradient_can_be_replaced() {
        let x = number(1.0);
        (&x * 2.0).backward();
        set_gradient(&x, Some(&Tensor::from_slice(&[5.0_f32])));
        assert_eq!(x.grad().double_value(&[0]), 5.0);
        set_gradient(&x, None);
        assert!(!x.grad().defined());
        (&x * 3.0).backward();
        assert_eq!(x.grad().double_value(&[0]), 3.0);
    }

    #[test]
    fn a_pass_begins_with_a_given_gradient() {
        let x = Tensor::from_slice(&[2.0_f32, 3.0]).set_requires_grad(true);
        backward(&(&x * &x), &Tensor::from_slice(&[10.0_f32, 1.0]));
        assert_eq!([0, 1].map(|i| x.grad().double_value(&[i])), [40.0, 6.0]);
    }

    #[test]
    fn tf32_is_allowed_and_forbidden() {
        for allowed in [true, false] {
            allow_tf32(allowed);
            // SAFETY: the call reads a flag of libtorch.
            assert_eq!(unsafe { onefold_tf32_is_allowed() }, allowed);
        }
    }
}
