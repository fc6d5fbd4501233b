//! The library with what this crate needs of libtorch's CUDA part, `libonefold_cuda.so`, which `trainer/cuda.sh` builds on a
//! host with GPUs: process groups of NCCL, and CUDA graphs.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Its name.
pub(crate) const NAME: &str = "libonefold_cuda.so";
/// Where it is, or the folder that it is in.
const PLACE: &str = "ONEFOLD_CUDA";
/// What to do where it is missing.
pub(crate) const HINT: &str = "build it on this host with `trainer/cuda.sh`, and name it in ONEFOLD_CUDA";

/// Opens the library once, after libtorch's CUDA part; it stays for the rest of the process. `None` if it is neither named by
/// ONEFOLD_CUDA nor beside the program. The error is for people.
pub(crate) fn open() -> Result<Option<&'static Library>, String> {
    static OPENED: OnceLock<Result<Option<Library>, String>> = OnceLock::new();
    OPENED
        .get_or_init(|| find()?.map(|path| open_at(&path)).transpose())
        .as_ref()
        .map(Option::as_ref)
        .map_err(Clone::clone)
}

/// The file that an environment variable names, or that has this name in the folder that it names; `None` where it is not
/// set. The error is for people.
pub(crate) fn named_by(variable: &str, name: &str) -> Result<Option<PathBuf>, String> {
    let Some(place) = std::env::var_os(variable).map(PathBuf::from) else { return Ok(None) };
    let path = if place.is_dir() { place.join(name) } else { place };
    let missing = || format!("{variable} is set, but there is no `{}`", path.display());
    if path.is_file() { Ok(Some(path)) } else { Err(missing()) }
}

fn find() -> Result<Option<PathBuf>, String> {
    if let Some(path) = named_by(PLACE, NAME)? {
        return Ok(Some(path));
    }
    let beside = std::env::current_exe().map_err(|error| error.to_string())?.with_file_name(NAME);
    Ok(beside.is_file().then_some(beside))
}

fn open_at(path: &Path) -> Result<Library, String> {
    // SAFETY: our sources initialise nothing of their own, and what they include of libtorch is written for that.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    library.map_err(|error| format!("`{}` cannot be loaded: {error}", path.display()))
}
