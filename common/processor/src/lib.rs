//! Ends a program at its start with a message if it is compiled for newer processors than the one that runs it.
//! Without this check, the program would die from an illegal instruction. Every program that links this crate is
//! checked.
//!
//! The check runs before `main`, and before Python's module is initialised, because all other code may already use
//! instructions that the processor lacks. For the same reason it only compares integers, and calls no other code of
//! Onefold or of the standard library.
//!
//! A shared library cannot refuse to be loaded. So the Python package checks the processor first, finds the text
//! below in its library, and raises it as an `ImportError` (`python/onefold/_processor.py`).
#![cfg(all(target_os = "linux", target_arch = "x86_64", target_feature = "avx2"))]

use std::arch::x86_64::{__cpuid, __cpuid_count};

/// Bits of ECX in CPUID leaf 1: FMA, MOVBE, XSAVE enabled by the operating system, AVX, F16C.
const FIRST: u32 = 1 << 12 | 1 << 22 | 1 << 27 | 1 << 28 | 1 << 29;
/// Bits of EBX in CPUID leaf 7: BMI1, AVX2, BMI2.
const SEVENTH: u32 = 1 << 3 | 1 << 5 | 1 << 8;
/// The bit of ECX in the extended CPUID leaf 1: LZCNT.
const EXTENDED: u32 = 1 << 5;

const REFUSAL: &[u8] = b"error: Onefold is compiled for processors with AVX2, BMI2 and FMA (x86-64-v3: Intel's since 2013, \
AMD's since 2015), and this one is older\n  hint: compile it here with RUSTFLAGS=\"-C target-cpu=native\" make build\n";

/// The dynamic loader calls this function when it loads a program or library.
#[used]
#[unsafe(link_section = ".init_array")]
static CHECK: extern "C" fn() = check;

extern "C" fn check() {
    if !has_instructions() {
        // SAFETY: the pointer and the length are those of `REFUSAL`, and nothing has to be cleaned up before `main`.
        unsafe {
            libc::write(libc::STDERR_FILENO, REFUSAL.as_ptr().cast(), REFUSAL.len());
            libc::_exit(1);
        }
    }
}

/// Returns whether the processor has the instructions of x86-64-v3. `is_x86_feature_detected` cannot be used: it is
/// always true for instructions that the compiler may use.
fn has_instructions() -> bool {
    __cpuid(0).eax >= 7
        && __cpuid(1).ecx & FIRST == FIRST
        && __cpuid_count(7, 0).ebx & SEVENTH == SEVENTH
        && __cpuid(1 << 31).eax > 1 << 31
        && __cpuid((1 << 31) + 1).ecx & EXTENDED == EXTENDED
}
