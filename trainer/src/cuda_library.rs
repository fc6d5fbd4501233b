//! Loads `libonefold_cuda.so`, which wraps the parts of libtorch's CUDA library that this crate needs: NCCL
//! process groups and CUDA graphs. `trainer/cuda.sh` builds it on a host with GPUs.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The name of the library file.
pub(crate) const NAME: &str = "libonefold_cuda.so";
/// The environment variable with the library's path, or with the folder that contains the library.
const PLACE: &str = "ONEFOLD_CUDA";
/// The hint in errors about a missing library.
pub(crate) const HINT: &str = "build it on this host with `trainer/cuda.sh`, and name it in ONEFOLD_CUDA";

/// Opens the library once per process, after libtorch's CUDA part. Returns `None` if `ONEFOLD_CUDA` is not set
/// and the library is not in the program's folder. The error is a message for users.
pub(crate) fn open() -> Result<Option<&'static Library>, String> {
    static OPENED: OnceLock<Result<Option<Library>, String>> = OnceLock::new();
    OPENED
        .get_or_init(|| find()?.map(|path| open_at(&path)).transpose())
        .as_ref()
        .map(Option::as_ref)
        .map_err(Clone::clone)
}

/// Returns the file that an environment variable names, or the file `name` in the folder that it names; `None`
/// if the variable is not set. The error is a message for users.
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
    // SAFETY: the library's own sources have no initializers, and libtorch's headers allow loading at run time.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    library.map_err(|error| format!("`{}` cannot be loaded: {error}", path.display()))
}
