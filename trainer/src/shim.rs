//! What the crate needs of libtorch beyond tch's interface, through `shim.cpp`: a tensor becomes the result of a function
//! whose gradients this crate computes, a backward pass begins with a given gradient, a leaf's gradient is put in its
//! place, fused optimizers take a step, and products on a GPU may use TF32.

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Kind, TchError, Tensor};
use torch_sys::C_tensor;

use crate::config::{DenseOptimizerConfig, DenseOptimizerKind};

/// From the gradient of an output to those of the inputs, `None` for one that needs none.
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

/// What a node keeps; `backward` takes the function, so that what it holds is freed with the pass that used it.
struct State {
    inputs: usize,
    backward: Option<Backward>,
}

/// Makes `output`, which was computed outside of the graph, a function of `inputs`: `backward` goes from its gradient to
/// theirs, in their order. A graph is gone through once. Where no gradients are needed, nothing is kept.
///
/// # Panics
///
/// If autograd refuses the tensor.
pub(crate) fn with_backward(
    mut output: Tensor,
    inputs: &[&Tensor],
    backward: impl FnOnce(&Tensor) -> Vec<Option<Tensor>> + Send + 'static,
) -> Tensor {
    let pointers: Vec<*mut C_tensor> = inputs.iter().map(|input| input.as_ptr().cast_mut()).collect();
    if !is_recorded(&pointers) {
        return output;
    }
    let state = Box::new(State { inputs: inputs.len(), backward: Some(Box::new(backward)) });
    // SAFETY: the pointers are of tensors that are alive. The node owns the state from here on; it calls `call` with it
    // while it lives, and `free` once, at its end.
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

/// Whether a result of these tensors has a gradient: one of them has, and the graph is recorded.
fn is_recorded(inputs: &[*mut C_tensor]) -> bool {
    // SAFETY: the pointers are of tensors that are alive.
    unsafe { onefold_is_recorded(inputs.as_ptr(), inputs.len()) }
}

/// Makes `gradient` that of a parameter, in the place of any that it had; `None` leaves it without one, so that the next
/// one is not added to anything.
pub(crate) fn set_gradient(parameter: &Tensor, gradient: Option<&Tensor>) {
    let gradient = gradient.map_or(std::ptr::null(), |gradient| gradient.as_ptr());
    // SAFETY: both are tensors that are alive, or null; the parameter's handle is not changed, but what it leads to.
    check(unsafe { onefold_set_gradient(parameter.as_ptr().cast_mut(), gradient) });
}

/// Goes back from `output`, whose gradient is `gradient`, of the same shape, to the leaves.
///
/// # Panics
///
/// If libtorch fails, as tch's own `backward` does.
pub(crate) fn backward(output: &Tensor, gradient: &Tensor) {
    // SAFETY: both are tensors that are alive.
    check(unsafe { onefold_backward(output.as_ptr(), gradient.as_ptr()) });
}

/// One of libtorch's fused optimizers, as `shim.cpp` takes it. What an algorithm does not have is ignored.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct FusedOptimizer {
    /// 0 is Adagrad, 1 SGD, 2 Adam, 3 AdamW.
    kind: i32,
    learning_rate: f64,
    weight_decay: f64,
    momentum: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
}

impl FusedOptimizer {
    /// The one that the configuration names, at this learning rate.
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

    /// How many tensors of state a parameter has.
    fn states(&self) -> usize {
        match self.kind {
            0 => 1,
            1 => usize::from(self.momentum > 0.0),
            _ => 2,
        }
    }
}

/// The tensors of a fused step: in each list one for each parameter, in the same order, contiguous, of one dimension and
/// of 32-bit floats.
#[derive(Debug, Default)]
pub(crate) struct FusedTensors {
    pub(crate) parameters: Vec<Tensor>,
    /// A step with a divisor leaves them divided.
    pub(crate) gradients: Vec<Tensor>,
    /// As many lists as the optimizer has states; the others are empty.
    pub(crate) states: [Vec<Tensor>; 2],
}

/// Step number `steps` of an optimizer, counted from 1, in place. Gradients are divided by `divisor` first; nothing
/// changes if `refused` is 1. Both have one float, where the parameters are.
///
/// # Errors
///
/// [`TchError::Torch`] if libtorch fails.
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
    // Every kernel of libtorch reads the number of the step from a tensor, which all parameters share here.
    let steps = Tensor::f_full([0_i64; 0], steps as f64, (Kind::Float, first.device()))?;
    let pointer = |tensor: Option<&Tensor>| tensor.map_or(std::ptr::null(), Tensor::as_ptr);
    // SAFETY: all pointers are null or of tensors that are alive, and `pointers` has `count` of them for the parameters,
    // for the gradients and for each of the optimizer's states, all of equal sizes.
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

/// Whether products of 32-bit floats on GPUs may have the mantissa of TF32, in all of the process.
pub(crate) fn allow_tf32(allowed: bool) {
    // SAFETY: it sets a flag of libtorch's.
    check(unsafe { onefold_allow_tf32(allowed) });
}

/// What a function of our C++ returned, as a result: null, or a message.
pub(crate) fn said(message: *mut c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: a message that is not null is a C string that belongs to the caller, here, who frees it once.
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
/// `state` is a [`State`] that is alive and used by nobody else; `gradient` is a tensor that is given away; there is room
/// for a pointer for every input at `gradients`.
unsafe extern "C" fn call(
    state: *mut c_void,
    gradient: *mut C_tensor,
    gradients: *mut *mut C_tensor,
) -> bool {
    // SAFETY: the caller's promise.
    let (state, gradient) = unsafe { (&mut *state.cast::<State>(), Tensor::from_ptr(gradient)) };
    let Some(backward) = state.backward.take() else { return false };
    let Ok(found) = catch_unwind(AssertUnwindSafe(|| backward(&gradient))) else { return false };
    assert_eq!(found.len(), state.inputs, "a gradient for every input");
    for (i, tensor) in found.into_iter().enumerate() {
        let pointer = tensor.map_or(std::ptr::null_mut(), |mut tensor| {
            let pointer = tensor.as_mut_ptr();
            // The node owns it now.
            std::mem::forget(tensor);
            pointer
        });
        // SAFETY: the caller's promise.
        unsafe { gradients.add(i).write(pointer) };
    }
    true
}

/// # Safety
///
/// `state` is a [`State`] that nobody uses any more.
unsafe extern "C" fn free(state: *mut c_void) {
    // SAFETY: the caller's promise; it was a box.
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
    fn what_backward_cannot_do_is_an_error() {
        let x = number(1.0);
        let output = with_backward(x.detach() * 2.0, &[&x], |_| panic!("no gradient"));
        let error = output.f_backward().unwrap_err();
        assert!(error.to_string().contains("a gradient could not be computed"), "{error}");
    }

    #[test]
    fn a_gradient_takes_anothers_place() {
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
            // SAFETY: it reads a flag of libtorch's.
            assert_eq!(unsafe { onefold_tf32_is_allowed() }, allowed);
        }
    }
}
