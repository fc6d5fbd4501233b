//! Ends a program at its start if it is compiled for newer processors than the one that runs it, in place of a signal
//! that says nothing. Whatever links this crate is checked.
//!
//! The check runs before `main`, and before Python's module is initialised: all other code may already use instructions
//! that the processor lacks. So it compares integers, and calls nothing of ours or of the standard library.
//!
//! A library that is loaded cannot refuse it. So the Python package looks at the processor first, finds the text below in
//! its library, and raises it as an `ImportError` (`python/onefold/_processor.py`).
#![cfg(all(target_os = "linux", target_arch = "x86_64", target_feature = "avx2"))]

use std::arch::x86_64::{__cpuid, __cpuid_count};

/// FMA, MOVBE, XSAVE by the operating system, AVX, F16C: bits of ECX in leaf 1.
const FIRST: u32 = 1 << 12 | 1 << 22 | 1 << 27 | 1 << 28 | 1 << 29;
/// BMI1, AVX2, BMI2: bits of EBX in leaf 7.
const SEVENTH: u32 = 1 << 3 | 1 << 5 | 1 << 8;
/// LZCNT: a bit of ECX in the extended leaf 1.
const EXTENDED: u32 = 1 << 5;

const REFUSAL: &[u8] = b"error: Onefold is compiled for processors with AVX2, BMI2 and FMA (x86-64-v3: Intel's since 2013, \
AMD's since 2015), and this one is older\n  hint: compile it here with RUSTFLAGS=\"-C target-cpu=native\" make build\n";

/// What the loader of programs and libraries calls.
#[used]
#[unsafe(link_section = ".init_array")]
static CHECK: extern "C" fn() = check;

extern "C" fn check() {
    if !has_instructions() {
        // SAFETY: the bytes are there, and nothing has to be cleaned up before `main`.
        unsafe {
            libc::write(libc::STDERR_FILENO, REFUSAL.as_ptr().cast(), REFUSAL.len());
            libc::_exit(1);
        }
    }
}

/// Whether the processor has the instructions of x86-64-v3. `is_x86_feature_detected` is always true for instructions
/// that the compiler may use.
fn has_instructions() -> bool {
    __cpuid(0).eax >= 7
        && __cpuid(1).ecx & FIRST == FIRST
        && __cpuid_count(7, 0).ebx & SEVENTH == SEVENTH
        && __cpuid(1 << 31).eax > 1 << 31
        && __cpuid((1 << 31) + 1).ecx & EXTENDED == EXTENDED
}
