//! The kernels on the CPU, for tests: `kernels.cu` compiled as C++ with the CUDA definitions of `host.cpp`.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use libloading::{Library, Symbol};
use tch::{Device, Kind, Tensor};

use super::replay::{Recorded, Recording};
use crate::Result;
use crate::device::{Accelerator, Argument, Driver, Graph, KERNELS, Slot};

type Launch = unsafe extern "C" fn(*const c_char, i64, c_uint, *mut *mut c_void, c_int, c_int) -> c_int;

const BLOCK: u32 = 64;

/// Returns an accelerator that runs on the CPU.
pub(crate) fn emulated() -> Accelerator {
    host(None)
}

fn host(recording: Option<Arc<Recording>>) -> Accelerator {
    Accelerator { driver: Arc::new(Host { backwards: AtomicBool::new(false), recording }) }
}

/// Records the kernel launches of `work`.
pub(super) fn recorded(work: impl FnOnce(&Accelerator)) -> Recorded {
    let recording = Arc::new(Recording::new());
    let accelerator = host(Some(Arc::clone(&recording)));
    work(&accelerator);
    drop(accelerator);
    Arc::into_inner(recording).expect("the device is used no more").end()
}

#[derive(Debug)]
struct Host {
    /// Whether the next kernel runs from its last thread to its first. It alternates, because no thread may need
    /// the result of another.
    backwards: AtomicBool,
    recording: Option<Arc<Recording>>,
}

/// Returns the compiled kernels.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| compile("host.cpp"))
}

/// Loads a CUDA driver that runs on the CPU, under the soname of the real driver, so that later loads of
/// `libcuda.so` return it.
pub(in crate::device) fn load_fake_driver() {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| compile("fake_driver.cpp"));
}

fn compile(main: &str) -> Library {
    let folder = tempfile::tempdir().unwrap();
    let soname = if main == "fake_driver.cpp" { "libcuda.so" } else { main };
    let soname = format!("-Wl,-soname,{soname}");
    let library = build(folder.path(), main, KERNELS, &["-O2", "-fPIC", "-shared", &soname]);
    // SAFETY: the library was just compiled from sources without initializers.
    unsafe { Library::new(library) }.unwrap()
}

/// Compiles one of our C++ sources with these kernels, in an empty folder. Returns the path of the binary.
pub(super) fn build(folder: &Path, main: &str, kernels: &str, flags: &[&str]) -> PathBuf {
    let [source, binary] = [main, "binary"].map(|name| folder.join(name));
    let sources = [
        ("kernels.cu", kernels),
        ("host.cpp", include_str!("host.cpp")),
        ("fake_driver.cpp", include_str!("fake_driver.cpp")),
        ("replay.cpp", include_str!("replay.cpp")),
    ];
    sources.iter().for_each(|(name, text)| fs_err::write(folder.join(name), text).unwrap());
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let common = ["-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"];
    let mut command = Command::new(compiler);
    let output = command.args(common).args(flags).arg(&source).arg("-o").arg(&binary).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    binary
}

/// Returns the types of a kernel's parameters, from its source.
fn parameters(kernel: &str) -> Vec<&'static str> {
    let head = format!("KERNEL {kernel}(");
    let start = KERNELS.find(&head).unwrap_or_else(|| panic!("there is no kernel `{kernel}`")) + head.len();
    let end = start + KERNELS[start..].find(')').unwrap();
    let kind = |parameter: &'static str| {
        let parameter = parameter.trim();
        if parameter.contains('*') { "pointer" } else { parameter.split_whitespace().next().unwrap() }
    };
    KERNELS[start..end].split(',').map(kind).collect()
}

impl Driver for Host {
    fn torch(&self) -> Device {
        Device::Cpu
    }

    fn describe(&self) -> String {
        "the processor in a GPU's place".to_owned()
    }

    unsafe fn launch(&self, kernel: &'static str, threads: i64, arguments: &[Argument<'_>]) -> Result<()> {
        let kind = |argument: &Argument<'_>| match argument {
            Argument::Pointer(_) => "pointer",
            Argument::Int(_) => "int",
            Argument::Long(_) => "i64",
            Argument::Float(_) => "float",
        };
        let kinds: Vec<_> = arguments.iter().map(kind).collect();
        assert_eq!(kinds, parameters(kernel), "the arguments of `{kernel}`");
        let values: Vec<[u8; 8]> = arguments.iter().map(Argument::bytes).collect();
        let mut pointers: Vec<*mut c_void> =
            values.iter().map(|value| value.as_ptr().cast_mut().cast()).collect();
        let name = CString::new(kernel).unwrap();
        let backwards = c_int::from(self.backwards.fetch_xor(true, Ordering::Relaxed));
        let blocks = threads.unsigned_abs().div_ceil(u64::from(BLOCK)) as i64;
        let mut launch = || {
            // SAFETY: `host.cpp` has this function and finds the kernel by its name. The assertion above checks the
            // types of the arguments; the caller guarantees that the pointers are valid.
            let known = unsafe {
                let launch: Symbol<'_, Launch> = library().get(b"onefold_launch").unwrap();
                launch(
                    name.as_ptr(),
                    blocks,
                    BLOCK,
                    pointers.as_mut_ptr(),
                    pointers.len() as c_int,
                    backwards,
                )
            };
            assert_eq!(known, 1, "`host.cpp` does not know `{kernel}`");
        };
        match &self.recording {
            None => launch(),
            Some(recording) => recording.during(kernel, (blocks, BLOCK), arguments, launch),
        }
        Ok(())
    }

    fn slot(&self, words: usize) -> Result<Box<dyn Slot>> {
        let device = Tensor::full([8 * words as i64], 0xff, (Kind::Uint8, Device::Cpu));
        Ok(Box::new(HostSlot {
            host: vec![u64::MAX; words],
            device,
            copied: None,
            arrived: true,
            released: true,
        }))
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn records(&self) -> bool {
        true
    }

    fn record(&self, work: &mut dyn FnMut()) -> Result<Box<dyn Graph>> {
        work();
        Ok(Box::new(Again))
    }

    fn memory(&self) -> Result<(u64, u64)> {
        Ok((1 << 30, 1 << 31))
    }
}

/// A graph that executes the work again instead of replaying a recording.
#[derive(Debug)]
struct Again;

impl Graph for Again {
    fn replay(&self, again: &mut dyn FnMut()) -> Result<(), String> {
        again();
        Ok(())
    }
}

/// Host and device memory that checks the order of calls. The copied data is visible from `arrive` on, not earlier.
#[derive(Debug)]
struct HostSlot {
    host: Vec<u64>,
    device: Tensor,
    copied: Option<usize>,
    arrived: bool,
    released: bool,
}

impl Slot for HostSlot {
    fn capacity(&self) -> usize {
        self.host.len()
    }

    fn host(&mut self) -> Result<&mut [u64]> {
        assert!(self.copied.is_none() || self.arrived, "a copy is under way");
        Ok(&mut self.host)
    }

    fn copy(&mut self, words: usize) -> Result<()> {
        assert!(self.released, "the last batch is still in use");
        (self.copied, self.arrived, self.released) = (Some(words), false, false);
        // Until the copy arrives, the memory contains other data.
        let _ = self.device.fill_(0xff);
        Ok(())
    }

    fn arrive(&mut self) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.host[..self.copied.expect("nothing was copied")]);
        self.device.narrow(0, 0, bytes.len() as i64).copy_(&Tensor::from_slice(bytes));
        self.arrived = true;
        Ok(())
    }

    fn release(&mut self) -> Result<()> {
        // A batch that was staged but never computed is released without `arrive`.
        (self.arrived, self.released) = (true, true);
        Ok(())
    }

    fn device(&self) -> &Tensor {
        &self.device
    }
}
