//! Compiles the shims for torch's c10d (`src/distributed/c10d.cpp`) and autograd (`src/shim.cpp`) as one
//! translation unit, and sets the run-time search path of this crate's binaries to the libtorch that they were
//! built with, so that they do not need `LD_LIBRARY_PATH`.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    let library = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys says where libtorch is");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{library}");
    compile_shims(Path::new(&library));
}

/// The folder with declarations of the Gloo classes that c10d's header names; see the README there.
const GLOO: &str = "src/distributed/declarations";

/// Compiles the shims with the compiler settings of torch-sys.
fn compile_shims(library: &Path) {
    const SOURCE: &str = "src/libtorch.cpp";
    for source in [SOURCE, "src/shim.cpp", "src/distributed/c10d.cpp", GLOO] {
        println!("cargo:rerun-if-changed={source}");
    }
    for name in ["LIBTORCH_INCLUDE", "LIBTORCH_CXX11_ABI"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let home = std::env::var_os("LIBTORCH_INCLUDE").map(PathBuf::from);
    let home = home.unwrap_or_else(|| library.parent().expect("`lib` is in libtorch's folder").to_owned());
    let abi = std::env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".to_owned());
    let mut build = cc::Build::new();
    // System headers, so that the compiler does not report warnings in third-party code.
    for folder in [home.join("include"), home.join("include/torch/csrc/api/include"), PathBuf::from(GLOO)] {
        build.flag("-isystem").flag(folder);
    }
    build
        .cpp(true)
        .std("c++17")
        .define("USE_C10D_GLOO", None)
        .define("_GLIBCXX_USE_CXX11_ABI", abi.as_str())
        .file(SOURCE)
        .compile("onefold_shims");
}
