//! A GPU through CUDA's driver library. `cudarc` loads the library at run time, so the build needs no CUDA toolkit.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaStream, DriverError, PinnedHostSlice, result as driver,
    sys as driver_sys,
};
use cudarc::nvrtc::{Ptx, result as nvrtc, sys as nvrtc_sys};
use onefold_base::fault::{option, text};
use onefold_base::units::format_bytes;
use tch::{Device, Kind, Tensor};

use super::graph::{Graph, Recorder};
use super::{Argument, Driver, KERNELS, Slot, failed, graph_failed, libtorch};
use crate::{Result, cuda_library};

/// The number of threads per block.
const BLOCK: u32 = 256;

/// Returns the names of all kernels.
pub(super) fn kernel_names() -> impl Iterator<Item = &'static str> {
    KERNELS.lines().filter_map(|line| line.strip_prefix("KERNEL ")?.split('(').next())
}

/// A GPU, which libtorch uses too.
#[derive(Debug)]
pub(super) struct Cuda {
    device: Device,
    context: Arc<CudaContext>,
    /// libtorch's stream, which is the default stream.
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    kernels: HashMap<&'static str, CudaFunction>,
    /// The recorder of graphs, if its library is installed.
    recorder: Option<Recorder>,
    name: String,
}

impl Cuda {
    /// Opens the GPU with index `number`.
    pub(super) fn open(number: usize) -> Result<Self> {
        let device = Device::Cuda(number);
        // SAFETY: it tries to load the driver's library, whose initializers are written for that, and returns
        // whether it succeeded.
        if !unsafe { driver_sys::is_culib_present() } {
            return Err(failed(
                device,
                "there is no NVIDIA driver: `libcuda.so.1` cannot be loaded",
                text!["install a driver for CUDA 13 (580 or newer), or use ", option("device").set_to("cpu")],
            ));
        }
        let wrong = |error: DriverError| driver_failed(device, "the driver cannot be used", error);
        driver::init().map_err(wrong)?;
        let count = CudaContext::device_count().map_err(wrong)?;
        if i32::try_from(number).is_ok_and(|number| number < count) {
            libtorch::load(device)?;
        } else {
            let hint = "`nvidia-smi -L` lists GPUs; CUDA_VISIBLE_DEVICES hides all but some; on a host start as many ranks as it has GPUs, at most";
            return Err(failed(device, format!("there is no such GPU: CUDA shows {count}"), hint));
        }
        if tch::Cuda::device_count() != i64::from(count) {
            let message = format!("libtorch finds {} GPUs, and CUDA {count}", tch::Cuda::device_count());
            return Err(failed(device, message, "the driver must be one for CUDA 13 (580 or newer)"));
        }
        let recorder = Recorder::open().map_err(|message| failed(device, message, cuda_library::HINT))?;
        Ok(Self { recorder, ..Self::new(device, number)? })
    }

    /// Opens the GPU with index `number`; its tensors are on the libtorch device `device`.
    fn new(device: Device, number: usize) -> Result<Self> {
        let wrong = |error: DriverError| driver_failed(device, "the driver cannot be used", error);
        let context = CudaContext::new(number).map_err(wrong)?;
        let (major, minor) = context.compute_capability().map_err(wrong)?;
        let kernels = load_kernels(device, &context, &format!("sm_{major}{minor}"))?;
        let name = context.name().map_err(wrong)?;
        let memory = format_bytes(context.total_mem().map_err(wrong)? as u64);
        Ok(Self {
            device,
            compute: context.default_stream(),
            copies: context.new_stream().map_err(wrong)?,
            context,
            kernels,
            recorder: None,
            name: format!("{name}, {memory}, compute capability {major}.{minor}"),
        })
    }

    fn failed(&self, what: &str, error: DriverError) -> crate::Error {
        driver_failed(self.device, what, error)
    }
}

fn driver_failed(device: Device, what: &str, error: DriverError) -> crate::Error {
    let name =
        error.error_string().map_or_else(|_| format!("{:?}", error.0), |text| text.to_string_lossy().into());
    let hint = "look at `nvidia-smi` and the kernel's log (`dmesg`); if the GPU is well, report this with the command line";
    failed(device, format!("{what}: {name}"), hint)
}

/// Compiles all kernels and loads them.
fn load_kernels(
    device: Device,
    context: &Arc<CudaContext>,
    architecture: &str,
) -> Result<HashMap<&'static str, CudaFunction>> {
    let image = compile(architecture).map_err(|message| {
        let hint = "NVRTC 13 comes with `pip install torch==2.11.0`; ONEFOLD_NVRTC names the folder of `libnvrtc.so.13`";
        failed(device, format!("the kernels cannot be compiled for {architecture}: {message}"), hint)
    })?;
    let wrong = |error: DriverError| driver_failed(device, "the kernels cannot be loaded", error);
    let module = context.load_module(Ptx::from_binary(image)).map_err(wrong)?;
    kernel_names().map(|name| Ok((name, module.load_function(name).map_err(wrong)?))).collect()
}

/// Compiles the kernels to machine code for an architecture such as `sm_90`. The error contains NVRTC's log.
pub(super) fn compile(architecture: &str) -> Result<Vec<u8>, String> {
    // SAFETY: as for `is_culib_present` above.
    if !unsafe { nvrtc_sys::is_culib_present() } {
        return Err("`libnvrtc.so.13` cannot be loaded".to_owned());
    }
    let source = CString::new(KERNELS).map_err(|error| error.to_string())?;
    let program =
        nvrtc::create_program(&source, Some(c"kernels.cu")).map_err(|error| format!("{error:?}"))?;
    let image = compile_program(program, architecture);
    // SAFETY: `program` was created above and is not used again.
    unsafe { nvrtc::destroy_program(program) }.map_err(|error| format!("{error:?}"))?;
    image
}

fn compile_program(program: nvrtc_sys::nvrtcProgram, architecture: &str) -> Result<Vec<u8>, String> {
    let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
    // SAFETY: `create_program` has created `program`.
    if let Err(error) = unsafe { nvrtc::compile_program(program, &options) } {
        // SAFETY: as above.
        let log = unsafe { nvrtc::get_program_log(program) }.unwrap_or_default();
        let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).collect();
        let log = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
        return Err(format!("{error:?}\n{}", log.trim_end()));
    }
    let mut size = 0;
    // SAFETY: `program` was compiled; `size` is written to.
    unsafe { nvrtc_sys::nvrtcGetCUBINSize(program, &raw mut size) }.result().map_err(|e| format!("{e:?}"))?;
    let mut image = vec![0_u8; size];
    // SAFETY: `image` has the size that NVRTC has just returned.
    unsafe { nvrtc_sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()) }
        .result()
        .map_err(|e| format!("{e:?}"))?;
    Ok(image)
}

impl Driver for Cuda {
    fn torch(&self) -> Device {
        self.device
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    unsafe fn launch(&self, kernel: &'static str, threads: i64, arguments: &[Argument<'_>]) -> Result<()> {
        let function = &self.kernels[kernel];
        let blocks = threads.unsigned_abs().div_ceil(u64::from(BLOCK));
        let Ok(blocks) = c_uint::try_from(blocks) else {
            let message = format!("`{kernel}` would take {threads} threads");
            return Err(failed(self.device, message, "lower `[train].batch_size`"));
        };
        let wrong = |error| self.failed(&format!("`{kernel}` cannot be launched"), error);
        self.context.bind_to_thread().map_err(wrong)?;
        let values: Vec<[u8; 8]> = arguments.iter().map(Argument::bytes).collect();
        let mut pointers: Vec<*mut c_void> =
            values.iter().map(|value| value.as_ptr().cast_mut().cast()).collect();
        // SAFETY: the function and the stream belong to this context and live as long as `self`. Each pointer
        // refers to a value with the size of its parameter, which the driver copies before it returns. The caller
        // guarantees that the values are valid for the kernel. The memory of tensors outlives the kernel, because
        // libtorch reuses it on this stream only.
        unsafe {
            driver::launch_kernel(
                function.cu_function(),
                (blocks, 1, 1),
                (BLOCK, 1, 1),
                0,
                self.compute.cu_stream(),
                &mut pointers,
            )
        }
        .map_err(wrong)
    }

    fn slot(&self, words: usize) -> Result<Box<dyn Slot>> {
        let bytes = words * size_of::<u64>();
        let what = format!("{} of pinned memory for batches", format_bytes(bytes as u64));
        let wrong = |error| self.failed(&what, error);
        // SAFETY: the words are written before they are read: the next line fills them with zeros.
        let mut host = unsafe { self.context.alloc_pinned_with_flags::<u64>(words, 0) }.map_err(wrong)?;
        host.as_mut_slice().map_err(wrong)?.fill(0);
        let device = Tensor::f_empty([bytes as i64], (Kind::Uint8, self.device)).map_err(|error| {
            let first = error.to_string().lines().next().unwrap_or_default().to_owned();
            failed(self.device, format!("{what}: {first}"), "lower `[train].batch_size`")
        })?;
        let event = || self.context.new_event(None).map_err(wrong);
        let slot = CudaSlot {
            torch: self.device,
            compute: Arc::clone(&self.compute),
            copies: Arc::clone(&self.copies),
            copied: event()?,
            used: event()?,
            host,
            device,
        };
        // The first copy waits for earlier uses of the memory.
        slot.used.record(&slot.compute).map_err(wrong)?;
        Ok(Box::new(slot))
    }

    fn synchronize(&self) -> Result<()> {
        self.context.synchronize().map_err(|error| self.failed("work on the GPU has failed", error))
    }

    fn records(&self) -> bool {
        self.recorder.is_some()
    }

    fn record(&self, work: &mut dyn FnMut()) -> Result<Box<dyn Graph>> {
        let recorder = self.recorder.expect("there is a recorder");
        recorder.record(self.context.ordinal(), work).map_err(|message| graph_failed(self.device, &message))
    }

    fn memory(&self) -> Result<(u64, u64)> {
        let (free, total) =
            self.context.mem_get_info().map_err(|error| self.failed("its memory is not known", error))?;
        Ok((free as u64, total as u64))
    }
}

/// Pinned host memory, and device memory of the same size.
#[derive(Debug)]
struct CudaSlot {
    torch: Device,
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    /// The end of the last copy.
    copied: CudaEvent,
    /// The end of the last batch's computations.
    used: CudaEvent,
    host: PinnedHostSlice<u64>,
    device: Tensor,
}

impl CudaSlot {
    fn failed(&self, error: DriverError) -> crate::Error {
        driver_failed(self.torch, "a batch cannot be copied to the GPU", error)
    }
}

impl Slot for CudaSlot {
    fn capacity(&self) -> usize {
        self.host.len()
    }

    fn host(&mut self) -> Result<&mut [u64]> {
        self.copied.synchronize().map_err(|error| self.failed(error))?;
        let torch = self.torch;
        self.host.as_mut_slice().map_err(|error| driver_failed(torch, "pinned memory is lost", error))
    }

    fn copy(&mut self, words: usize) -> Result<()> {
        let result = self.copies.wait(&self.used).and_then(|()| {
            let source = &self.host.as_slice()?[..words];
            // SAFETY: the tensor has as many bytes as the pinned memory, and belongs to the context that `wait` has
            // bound to this thread. Neither is freed (see `drop`) or written to (see `host`) before the copy is
            // done. Work that reads the tensor waits for the copy (see `arrive`), and earlier work is done (the
            // wait above).
            unsafe {
                let target = self.device.data_ptr() as driver_sys::CUdeviceptr;
                driver::memcpy_htod_async(target, source, self.copies.cu_stream())
            }?;
            self.copied.record(&self.copies)
        });
        result.map_err(|error| self.failed(error))
    }

    fn arrive(&mut self) -> Result<()> {
        self.compute.wait(&self.copied).map_err(|error| self.failed(error))
    }

    fn release(&mut self) -> Result<()> {
        self.used.record(&self.compute).map_err(|error| self.failed(error))
    }

    fn device(&self) -> &Tensor {
        &self.device
    }
}

impl Drop for CudaSlot {
    fn drop(&mut self) {
        // Wait for a copy in progress before its memory is freed. If the GPU has failed, there is nothing to wait
        // for.
        let _ = self.copied.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::host::load_fake_driver;
    use super::super::{Accelerator, check_kernels};
    use super::*;

    /// Returns a GPU with the driver `fake_driver.cpp`, which uses host memory.
    fn fake() -> Cuda {
        load_fake_driver();
        libtorch::load_nvrtc(None);
        Cuda::new(Device::Cpu, 0).unwrap_or_else(|error| {
            panic!("{error}\n  `make test-rust` runs this test with ONEFOLD_NVRTC=$(trainer/nvrtc.sh)")
        })
    }

    #[test]
    fn kernels_are_launched_as_the_driver_wants_it() {
        let cuda = fake();
        assert_eq!(cuda.describe(), "Fake GPU, 3.0 GiB, compute capability 9.0");
        assert_eq!(cuda.memory().unwrap(), (2 << 30, 3 << 30));
        let accelerator = Accelerator { driver: Arc::new(cuda) };
        for seed in 0..5 {
            for check in check_kernels(&accelerator, seed).unwrap() {
                assert!(check.relative_error < 1e-5, "{check:?}");
            }
        }
        accelerator.synchronize().unwrap();
    }

    #[test]
    fn copies_are_ordered_by_events() {
        let cuda = fake();
        let mut slot = cuda.slot(4).unwrap();
        let on_device =
            |slot: &dyn Slot| Vec::<i64>::try_from(slot.device().view_dtype(Kind::Int64)).unwrap();
        for round in 1..4 {
            slot.host().unwrap().fill(round);
            slot.copy(4).unwrap();
            // The fake driver copies as late as possible.
            assert_ne!(on_device(&*slot), [round as i64; 4]);
            slot.arrive().unwrap();
            assert_eq!(on_device(&*slot), [round as i64; 4]);
            slot.release().unwrap();
        }
        // `host` returns only after the last copy has read the memory.
        slot.host().unwrap().fill(8);
        slot.copy(4).unwrap();
        slot.host().unwrap().fill(9);
        slot.arrive().unwrap();
        assert_eq!(on_device(&*slot), [8; 4]);
    }

    #[test]
    fn refusals_of_the_driver_are_errors() {
        let cuda = fake();
        // More than the fake driver provides.
        let error = cuda.slot(1 << 50).unwrap_err().to_string();
        assert!(error.contains("of pinned memory for batches: ") && error.contains("\n  hint: "), "{error}");
    }
}
