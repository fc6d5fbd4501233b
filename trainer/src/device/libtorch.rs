//! libtorch's CUDA part, which is loaded only if a GPU is used: the program links only the CPU part.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tch::Device;

use super::failed;
use crate::{Result, cuda_library};

/// The environment variable with the path of `libtorch_cuda.so` or of its folder.
const PLACE: &str = "ONEFOLD_LIBTORCH_CUDA";
/// The environment variable with the folder of NVRTC, if NVRTC is not beside libtorch.
const NVRTC_PLACE: &str = "ONEFOLD_NVRTC";
const LIBRARY: &str = "libtorch_cuda.so";
/// The libtorch version that the program was built with. The CPU and the CUDA part must have the same version.
const VERSION: &str = "2.11.0";
const CUDA: &str = "+cu13";
/// NVRTC and the library that it opens by name; the latter is loaded first.
const NVRTC: [&str; 2] = ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"];

const HINT: &str = "install it with `pip install torch==2.11.0`, or name its folder in ONEFOLD_LIBTORCH_CUDA";

/// Loads `libtorch_cuda.so` and NVRTC, once per process.
pub(super) fn load(device: Device) -> Result<()> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let path = find()?;
        check_version(&path)?;
        open(&path)?;
        load_nvrtc(Some(&path));
        Ok(())
    });
    loaded.clone().map_err(|message| failed(device, message, HINT))
}

/// Opens a library with global symbols for the rest of the process.
fn open(path: &Path) -> Result<(), String> {
    // SAFETY: initializers of the libraries that are opened here register operators and allocate memory. They are
    // written to be run by `dlopen`, as Python does, and `check_version` has checked that libtorch's parts have the
    // same version. The handle is leaked below, so the library is never unloaded.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|error| format!("`{}` cannot be loaded: {error}", path.display()))?;
    std::mem::forget(library);
    Ok(())
}

/// Finds the library: by the environment variable, beside the CPU part, or in Python's torch.
fn find() -> Result<PathBuf, String> {
    if let Some(path) = cuda_library::named_by(PLACE, LIBRARY)? {
        return Ok(path);
    }
    let beside = loaded_from("libtorch_cpu.so").map(|path| path.with_file_name(LIBRARY));
    let found = beside.filter(|path| path.is_file()).or_else(of_python);
    found.ok_or_else(|| {
        format!("there is no `{LIBRARY}` of libtorch {VERSION}, neither beside the program's `libtorch_cpu.so` nor in `python3`'s torch")
    })
}

/// Returns the file of a loaded library.
fn loaded_from(library: &str) -> Option<PathBuf> {
    let maps = fs_err::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        path.ends_with(library).then(|| PathBuf::from(path))
    })
}

/// Returns the library of the torch that `python3` would import, without importing it.
fn of_python() -> Option<PathBuf> {
    let program = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])";
    let output = Command::new("python3").args(["-c", program]).output().ok()?;
    let folder = String::from_utf8(output.stdout).ok()?;
    let path = Path::new(folder.trim()).join("lib").join(LIBRARY);
    (output.status.success() && path.is_file()).then_some(path)
}

/// Refuses a version other than the program's, because the interface between the two parts is not stable.
fn check_version(library: &Path) -> Result<(), String> {
    let home = library.parent().and_then(Path::parent).unwrap_or(library);
    let version = version_of(home);
    match version {
        Some(version) if version.starts_with(VERSION) && version.contains(CUDA) => Ok(()),
        Some(version) => Err(format!(
            "`{}` is of libtorch {version}, and this program needs {VERSION}{CUDA}0",
            library.display()
        )),
        None => Err(format!(
            "the version of `{}` is not known: `{}` has neither `version.py` nor `build-version`",
            library.display(),
            home.display()
        )),
    }
}

/// Returns the version of an installed torch or of an unpacked libtorch.
fn version_of(home: &Path) -> Option<String> {
    if let Ok(text) = fs_err::read_to_string(home.join("version.py")) {
        let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
        return Some(line.trim().trim_matches(['\'', '"']).to_owned());
    }
    fs_err::read_to_string(home.join("build-version")).ok().map(|text| text.trim().to_owned())
}

/// Opens NVRTC by its path if the path is known, so that later lookups by name find it. Otherwise, the system's
/// NVRTC is used.
pub(super) fn load_nvrtc(libtorch: Option<&Path>) {
    let of_pip = |library: &Path| Some(library.ancestors().nth(3)?.join("nvidia/cu13/lib"));
    let folders = [
        std::env::var_os(NVRTC_PLACE).map(PathBuf::from),
        libtorch.and_then(of_pip),
        libtorch.and_then(Path::parent).map(Path::to_owned),
    ];
    let folder = folders.into_iter().flatten().find(|folder| folder.join(NVRTC[1]).is_file());
    if let Some(folder) = folder {
        for name in NVRTC {
            if let Err(message) = open(&folder.join(name)) {
                tracing::warn!("{message}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("lib").join(LIBRARY);
        let checked = |file: &str, text: &str| {
            fs_err::write(folder.path().join(file), text).unwrap();
            check_version(&library)
        };
        assert!(check_version(&library).unwrap_err().contains("neither `version.py`"));
        assert!(checked("build-version", "2.11.0+cu130\n").is_ok());
        let python = |version: &str| format!("from typing import Optional\n__version__ = '{version}'\n");
        assert!(checked("version.py", &python("2.11.0+cu130")).is_ok());
        for other in ["2.11.0+cpu", "2.10.1+cu130"] {
            let message = checked("version.py", &python(other)).unwrap_err();
            assert!(message.contains(&format!("of libtorch {other}")), "{message}");
        }
    }

    #[test]
    fn the_cpu_part_is_found_where_it_was_loaded_from() {
        // Any operation, so that the library is loaded.
        assert_eq!(tch::Tensor::from_slice(&[1.0_f32]).numel(), 1);
        assert!(loaded_from("libtorch_cpu.so").unwrap().is_file());
        assert!(loaded_from("libno-such-thing.so").is_none());
    }
}
