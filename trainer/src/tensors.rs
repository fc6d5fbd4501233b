//! Conversions between slices and libtorch tensors.

use std::mem::MaybeUninit;
use std::sync::Mutex;

use onefold_base::sync::locked;
use onefold_kernels::element::Elements;
use onefold_kernels::fresh::write_all;
use tch::{Device, Kind, Tensor};

/// Seeds libtorch's random number generator and runs `work`. All threads share the generator, so all code that
/// draws from it must run through this function, which runs one caller at a time.
pub(crate) fn seeded<T>(seed: i64, work: impl FnOnce() -> T) -> T {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let _alone = locked(&GENERATOR);
    tch::manual_seed(seed);
    work()
}

/// Creates a CPU tensor of this shape, initialized with zeros, whose elements `fill` sets.
pub(crate) fn filled(shape: &[i64], fill: impl FnOnce(&mut [f32])) -> Tensor {
    let mut tensor = Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    // SAFETY: the tensor is new, so nothing else uses its storage.
    fill(unsafe { as_mut_slice(&mut tensor) });
    tensor
}

/// A type of tensor elements in memory.
pub(crate) trait Stored: Copy {
    /// The corresponding libtorch type.
    const KIND: Kind;
}

impl Stored for f32 {
    const KIND: Kind = Kind::Float;
}

/// The bits of a bfloat16.
impl Stored for u16 {
    const KIND: Kind = Kind::BFloat16;
}

/// Creates a CPU tensor of this shape. `write` must initialize all of the memory that it gets, and return it.
pub(crate) fn written<T: Stored>(
    shape: &[i64],
    write: impl FnOnce(&mut [MaybeUninit<T>]) -> &mut [T],
) -> Tensor {
    let tensor = Tensor::empty(shape, (T::KIND, Device::Cpu));
    let length = tensor.numel();
    if length > 0 {
        let start = tensor.data_ptr().cast::<MaybeUninit<T>>();
        // SAFETY: a new CPU tensor has `length` contiguous elements of its type, and nothing else uses its
        // storage; `MaybeUninit` allows uninitialized elements.
        write_all(unsafe { std::slice::from_raw_parts_mut(start, length) }, write);
    }
    tensor
}

/// Returns the elements of a contiguous CPU tensor of 32-bit floats or bfloat16.
///
/// # Panics
///
/// Panics if the tensor has another type.
///
/// # Safety
///
/// The requirements of [`as_slice`].
pub(crate) unsafe fn elements(tensor: &Tensor) -> Elements<'_> {
    // SAFETY: the caller meets the requirements of `as_slice`, which are the same for `as_bits`.
    unsafe {
        match tensor.kind() {
            Kind::BFloat16 => Elements::Bf16(as_bits(tensor)),
            _ => Elements::Fp32(as_slice(tensor)),
        }
    }
}

/// Copies `values` to a tensor of this shape.
pub(crate) fn from_f32(values: &[f32], shape: &[i64]) -> Tensor {
    Tensor::from_slice(values).reshape(shape)
}

/// Returns a copy of the elements of an `f32` tensor.
///
/// # Panics
///
/// Panics if the tensor has another type.
pub(crate) fn to_vec(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.detach().to_device(Device::Cpu).contiguous();
    // SAFETY: the slice is copied immediately; no other code of this thread runs meanwhile, and only one thread
    // writes tensors of the dense part.
    unsafe { as_slice(&tensor) }.to_vec()
}

/// Returns a copy of the bytes of a tensor of any type.
pub(crate) fn to_bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.detach().to_device(Device::Cpu).contiguous();
    // SAFETY: as in `to_vec`.
    unsafe { as_bytes(&tensor) }.to_vec()
}

/// Returns the elements of a contiguous `f32` tensor on the CPU.
///
/// # Panics
///
/// Panics if the tensor has another type, is on another device or is not contiguous.
///
/// # Safety
///
/// The elements must not be written during the lifetime of the slice, neither through another handle of the
/// tensor nor through a tensor that shares its storage.
pub(crate) unsafe fn as_slice(tensor: &Tensor) -> &[f32] {
    let length = checked_len(tensor);
    if length == 0 {
        return &[];
    }
    // SAFETY: `checked_len` has asserted that the tensor is defined, on the CPU, of 32-bit floats and
    // contiguous, so `length` initialized floats start at `data_ptr`. The borrow of `tensor` keeps its storage
    // alive, and the caller guarantees that nothing writes to it meanwhile.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<f32>(), length) }
}

/// Returns the bytes of a contiguous CPU tensor of any type.
///
/// # Panics
///
/// Panics if the tensor is on another device or is not contiguous.
///
/// # Safety
///
/// The requirements of [`as_slice`].
unsafe fn as_bytes(tensor: &Tensor) -> &[u8] {
    assert!(tensor.defined() && tensor.device() == Device::Cpu, "a tensor on the CPU is needed");
    assert!(tensor.is_contiguous(), "a contiguous tensor is needed");
    let length = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if length == 0 {
        return &[];
    }
    // SAFETY: as in `as_slice`. A contiguous tensor of `numel` elements has `length` bytes from `data_ptr` on.
    // Bytes need no alignment, and all values of a byte are valid.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), length) }
}

/// Returns the elements of a contiguous CPU tensor of 16-bit integers or bfloat16, as bits.
///
/// # Panics
///
/// Panics if the tensor has another type, is on another device or is not contiguous.
///
/// # Safety
///
/// The requirements of [`as_slice`].
pub(crate) unsafe fn as_bits(tensor: &Tensor) -> &[u16] {
    assert!(matches!(tensor.kind(), Kind::Int16 | Kind::BFloat16), "a tensor of 16-bit elements is needed");
    // SAFETY: the caller meets the requirements of `as_bytes`.
    let bytes = unsafe { as_bytes(tensor) };
    // An empty slice may have an unaligned address, which `cast_slice` rejects.
    if bytes.is_empty() { &[] } else { bytemuck::cast_slice(bytes) }
}

/// Returns whether all values are finite.
pub(crate) fn are_finite(values: &[f32]) -> bool {
    // Without the sign bit, the bits of infinity, as an integer, are less than those of NaN and greater than
    // all others.
    let largest = |values: &[f32]| values.iter().fold(0, |max, value| max.max(value.to_bits() & 0x7fff_ffff));
    values.chunks(1 << 14).all(|values| largest(values) < f32::INFINITY.to_bits())
}

/// Returns the elements of a contiguous `f32` tensor on the CPU, to be changed in place.
///
/// # Panics
///
/// Panics if the tensor has another type, is on another device or is not contiguous.
///
/// # Safety
///
/// The elements must not be read or written in another way during the lifetime of the slice, neither through
/// another handle of the tensor nor through a tensor that shares its storage.
pub(crate) unsafe fn as_mut_slice(tensor: &mut Tensor) -> &mut [f32] {
    let length = checked_len(tensor);
    if length == 0 {
        return &mut [];
    }
    // SAFETY: as in `as_slice`; the caller guarantees that nothing else uses the elements meanwhile.
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
    fn elements_are_copied_to_and_from_tensors() {
        let tensor = filled(&[2, 2], |values| values.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]));
        assert_eq!(tensor.double_value(&[1, 0]), 3.0);
        assert_eq!(to_vec(&tensor), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(to_vec(&tensor.tr()), [1.0, 3.0, 2.0, 4.0]);
        assert!(to_vec(&filled(&[0, 3], |_| ())).is_empty());
    }

    #[test]
    fn tensors_contain_what_was_written() {
        let tensor = written(&[2, 2], |memory| {
            fill_chunks(memory, 3, || (), |(), number, chunk| chunk.fill(number as f32))
        });
        assert_eq!(to_vec(&tensor), [0.0, 0.0, 0.0, 1.0]);
        assert!(to_vec(&written::<f32>(&[0, 3], zeroed)).is_empty());
    }

    #[test]
    #[should_panic(expected = "all is written")]
    fn a_partly_written_tensor_panics() {
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
        // SAFETY: nothing else uses the tensor.
        unsafe { as_slice(&transposed) };
    }
}
