//! Between slices and libtorch tensors.

use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

use onefold_kernels::element::Elements;
use onefold_kernels::fresh::write_all;
use tch::{Device, Kind, Tensor};

/// Runs `work` with libtorch's generator of random numbers seeded. All threads share that generator, so everything
/// that draws from it runs in here, one at a time.
pub(crate) fn seeded<T>(seed: i64, work: impl FnOnce() -> T) -> T {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(seed);
    work()
}

/// A new CPU tensor of this shape whose elements `fill` sets; they start as zeros.
pub(crate) fn filled(shape: &[i64], fill: impl FnOnce(&mut [f32])) -> Tensor {
    let mut tensor = Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    // SAFETY: the tensor is new, so that nobody else has its storage.
    fill(unsafe { as_mut_slice(&mut tensor) });
    tensor
}

/// What the elements of a tensor are in memory.
pub(crate) trait Stored: Copy {
    /// Their kind.
    const KIND: Kind;
}

impl Stored for f32 {
    const KIND: Kind = Kind::Float;
}

/// The bits of a bfloat16.
impl Stored for u16 {
    const KIND: Kind = Kind::BFloat16;
}

/// A new CPU tensor of this shape. `write` must initialize all of the memory that it is given, and return it.
pub(crate) fn written<T: Stored>(
    shape: &[i64],
    write: impl FnOnce(&mut [MaybeUninit<T>]) -> &mut [T],
) -> Tensor {
    let tensor = Tensor::empty(shape, (T::KIND, Device::Cpu));
    let length = tensor.numel();
    if length > 0 {
        let start = tensor.data_ptr().cast::<MaybeUninit<T>>();
        // SAFETY: a new tensor on the CPU has so many elements of its kind side by side, and nobody else has its
        // storage; they need not be initialised.
        write_all(unsafe { std::slice::from_raw_parts_mut(start, length) }, write);
    }
    tensor
}

/// The elements of a contiguous tensor of 32-bit floats or of bfloat16 on the CPU.
///
/// # Panics
///
/// If the tensor is of another kind.
///
/// # Safety
///
/// As that of [`as_slice`].
pub(crate) unsafe fn elements(tensor: &Tensor) -> Elements<'_> {
    // SAFETY: the caller's promise is the one that is asked for.
    unsafe {
        match tensor.kind() {
            Kind::BFloat16 => Elements::Bf16(as_bits(tensor)),
            _ => Elements::Fp32(as_slice(tensor)),
        }
    }
}

/// A copy of `values` as a tensor of this shape.
pub(crate) fn from_f32(values: &[f32], shape: &[i64]) -> Tensor {
    Tensor::from_slice(values).reshape(shape)
}

/// A copy of the elements of an `f32` tensor.
///
/// # Panics
///
/// If the tensor is of another kind.
pub(crate) fn to_vec(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.detach().to_device(Device::Cpu).contiguous();
    // SAFETY: the slice is copied at once; no other code of this thread runs meanwhile, and tensors of the dense part
    // are written by one thread.
    unsafe { as_slice(&tensor) }.to_vec()
}

/// A copy of the bytes of a tensor, whatever its kind.
pub(crate) fn to_bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.detach().to_device(Device::Cpu).contiguous();
    // SAFETY: as in `to_vec`.
    unsafe { as_bytes(&tensor) }.to_vec()
}

/// The elements of a contiguous `f32` tensor on the CPU.
///
/// # Panics
///
/// If the tensor is of another kind.
///
/// # Safety
///
/// As long as the slice lives, nobody writes the elements: not by another handle of the tensor, nor by one that shares
/// its storage.
pub(crate) unsafe fn as_slice(tensor: &Tensor) -> &[f32] {
    let length = checked_len(tensor);
    if length == 0 {
        return &[];
    }
    // SAFETY: `checked_len` has asserted that the tensor is defined, on the CPU, of 32-bit floats and contiguous, so
    // `length` initialised floats start at `data_ptr`. The borrow of `tensor` keeps its storage alive, and the caller
    // promises that nobody writes to it meanwhile.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<f32>(), length) }
}

/// The bytes of a contiguous tensor on the CPU, whatever its kind.
///
/// # Panics
///
/// If the tensor is elsewhere, or not contiguous.
///
/// # Safety
///
/// As that of [`as_slice`].
unsafe fn as_bytes(tensor: &Tensor) -> &[u8] {
    assert!(tensor.defined() && tensor.device() == Device::Cpu, "a tensor on the CPU is needed");
    assert!(tensor.is_contiguous(), "a contiguous tensor is needed");
    let length = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if length == 0 {
        return &[];
    }
    // SAFETY: as in `as_slice`; a contiguous tensor of `numel` elements has so many bytes from `data_ptr` on, and bytes
    // have neither an alignment nor values that they may not have.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), length) }
}

/// The elements of a contiguous tensor of 16-bit integers or of bfloat16 on the CPU, as bits.
///
/// # Panics
///
/// If the tensor is of another kind.
///
/// # Safety
///
/// As that of [`as_slice`].
pub(crate) unsafe fn as_bits(tensor: &Tensor) -> &[u16] {
    assert!(matches!(tensor.kind(), Kind::Int16 | Kind::BFloat16), "a tensor of 16-bit elements is needed");
    // SAFETY: the caller's promise is that of `as_bytes`.
    let bytes = unsafe { as_bytes(tensor) };
    // No bytes stand nowhere in particular.
    if bytes.is_empty() { &[] } else { bytemuck::cast_slice(bytes) }
}

/// Whether all values are finite numbers.
pub(crate) fn are_finite(values: &[f32]) -> bool {
    // Without its sign, the number of infinity is smaller than those of NaN and larger than all others.
    let largest = |values: &[f32]| values.iter().fold(0, |max, value| max.max(value.to_bits() & 0x7fff_ffff));
    values.chunks(1 << 14).all(|values| largest(values) < f32::INFINITY.to_bits())
}

/// The elements of a contiguous `f32` tensor on the CPU, to be changed in place.
///
/// # Panics
///
/// If the tensor is of another kind.
///
/// # Safety
///
/// As long as the slice lives, the elements are neither read nor written in another way: not by another handle of
/// the tensor, nor by one that shares its storage.
pub(crate) unsafe fn as_mut_slice(tensor: &mut Tensor) -> &mut [f32] {
    let length = checked_len(tensor);
    if length == 0 {
        return &mut [];
    }
    // SAFETY: as in `as_slice`, and the caller promises that nobody else uses the elements meanwhile.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<f32>(), length) }
}

fn checked_len(tensor: &Tensor) -> usize {
    assert!(tensor.defined() && tensor.device() == Device::Cpu, "a tensor on the CPU is needed");
    assert!(tensor.kind() == Kind::Float && tensor.is_contiguous(), "a contiguous tensor of f32 is needed");
    tensor.numel()
}

#[cfg(test)]
mod tests {
    use onefold_kernels::fresh::{fill_chunks, zeroed};

    use super::*;

    #[test]
    fn elements_go_both_ways() {
        let tensor = filled(&[2, 2], |values| values.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]));
        assert_eq!(tensor.double_value(&[1, 0]), 3.0);
        assert_eq!(to_vec(&tensor), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(to_vec(&tensor.tr()), [1.0, 3.0, 2.0, 4.0]);
        assert!(to_vec(&filled(&[0, 3], |_| ())).is_empty());
    }

    #[test]
    fn what_is_written_stands_there() {
        let tensor = written(&[2, 2], |memory| {
            fill_chunks(memory, 3, || (), |(), number, chunk| chunk.fill(number as f32))
        });
        assert_eq!(to_vec(&tensor), [0.0, 0.0, 0.0, 1.0]);
        assert!(to_vec(&written::<f32>(&[0, 3], zeroed)).is_empty());
    }

    #[test]
    #[should_panic(expected = "all is written")]
    fn a_part_is_not_all() {
        let _ = written::<f32>(&[4], |memory| zeroed(&mut memory[..3]));
    }

    #[test]
    fn bytes_are_those_of_the_kind() {
        let tensor = Tensor::from_slice(&[1.0_f32, -2.0, 0.5]).to_kind(Kind::BFloat16);
        assert_eq!(to_bytes(&tensor), [0x80, 0x3f, 0x00, 0xc0, 0x00, 0x3f]);
        assert!(to_bytes(&tensor.narrow(0, 3, 0)).is_empty());
    }

    #[test]
    #[should_panic(expected = "contiguous")]
    fn a_transposed_tensor_is_refused() {
        let transposed = from_f32(&[1.0, 2.0, 3.0, 4.0], &[2, 2]).transpose(0, 1);
        // SAFETY: nobody else has the tensor.
        unsafe { as_slice(&transposed) };
    }
}
