//! Loads `libonefold_cuda.so`, which wraps the parts of libtorch's CUDA library that this crate needs: NCCL
//! process groups and CUDA graphs. `trainer/cuda.sh` builds it on a host with GPUs.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The name of the library file.
pub(crate) const NAME: &str = "libonefold_cuda.so";
/// The version of the library's functions, and the libtorch that it must be compiled for, as in `graph.cpp`. A change of
/// a function in `graph.cpp` or `nccl.cpp` must change the number in both.
const VERSION: &str = "1 for libtorch 2.11.0";
/// The environment variable with the library's path, or with the folder that contains the library.
const PLACE: &str = "ONEFOLD_CUDA";
/// The hint in errors about a missing library.
pub(crate) const HINT: &str =
    "build it on this host with `trainer/cuda.sh` while ONEFOLD_CUDA is not set, and name it there";

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
    let library = library.map_err(|error| format!("`{}` cannot be loaded: {error}", path.display()))?;
    let version = version_of(&library).unwrap_or_else(|| "unknown".to_owned());
    if version != VERSION {
        let path = path.display();
        return Err(format!("`{path}` has the version `{version}`, and this program needs `{VERSION}`"));
    }
    Ok(library)
}

/// Returns the version of an opened library; `None` if it has none.
fn version_of(library: &Library) -> Option<String> {
    // SAFETY: in every library that has it, the function has this type and returns a string that is never freed.
    unsafe {
        let version = library.get::<unsafe extern "C" fn() -> *const c_char>(b"onefold_cuda_version").ok()?;
        Some(CStr::from_ptr(version()).to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens a library whose source is `source`.
    fn open(source: &str) -> Result<Library, String> {
        let folder = tempfile::tempdir().unwrap();
        let [file, library] = ["version.cpp", NAME].map(|name| folder.path().join(name));
        fs_err::write(&file, source).unwrap();
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let mut command = std::process::Command::new(compiler);
        let compiled =
            command.args(["-shared", "-fPIC"]).arg(&file).arg("-o").arg(&library).output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        open_at(&library)
    }

    #[test]
    fn a_library_of_another_version_is_refused() {
        let of = |version: &str| {
            open(&format!("extern \"C\" const char* onefold_cuda_version() {{ return \"{version}\"; }}"))
        };
        assert!(of(VERSION).is_ok());
        let other = of("1 for libtorch 2.10.0").unwrap_err();
        assert!(other.contains("has the version `1 for libtorch 2.10.0`, and this program needs"), "{other}");
        let none = open("extern \"C\" void onefold_graph_begin() {}").unwrap_err();
        assert!(none.contains("has the version `unknown`"), "{none}");
    }

    #[test]
    fn the_source_of_the_library_has_the_version_of_the_program() {
        let (number, libtorch) = VERSION.split_once(" for libtorch ").unwrap();
        let source = include_str!("device/graph.cpp");
        assert!(source.contains(&format!("return \"{number} for libtorch \" TORCH_VERSION;")));
        assert!(include_str!("../libtorch.sh").contains(libtorch), "{libtorch}");
    }
}
