//! Compiles what calls torch's c10d (`src/distributed/c10d.cpp`) and autograd (`src/shim.cpp`), and makes the binaries of this crate find the
//! libtorch that they were built with, without LD_LIBRARY_PATH.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    let library = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys says where libtorch is");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{library}");
    compile_shims(Path::new(&library));
}

/// Compiles the shims as torch-sys compiles its own.
fn compile_shims(library: &Path) {
    const SOURCES: [&str; 2] = ["src/shim.cpp", "src/distributed/c10d.cpp"];
    SOURCES.iter().for_each(|source| println!("cargo:rerun-if-changed={source}"));
    for name in ["ONEFOLD_GLOO", "LIBTORCH_INCLUDE", "LIBTORCH_CXX11_ABI"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let gloo = std::env::var_os("ONEFOLD_GLOO").map(PathBuf::from).unwrap_or_default();
    if !gloo.join("gloo/context.h").is_file() {
        let problem = if gloo.as_os_str().is_empty() {
            "ONEFOLD_GLOO is not set: it names the folder of Gloo's headers".to_owned()
        } else {
            format!("ONEFOLD_GLOO={} holds no gloo/context.h", gloo.display())
        };
        println!("cargo::error={problem}");
        println!("cargo::error=hint: run `make build`, or export ONEFOLD_GLOO=$(trainer/gloo.sh)");
        return;
    }
    let home = std::env::var_os("LIBTORCH_INCLUDE").map(PathBuf::from);
    let home = home.unwrap_or_else(|| library.parent().expect("`lib` is in libtorch's folder").to_owned());
    let abi = std::env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".to_owned());
    let mut build = cc::Build::new();
    // Others' headers come as the system's: their warnings are not ours.
    for folder in [home.join("include"), home.join("include/torch/csrc/api/include"), gloo] {
        build.flag("-isystem").flag(folder);
    }
    build
        .cpp(true)
        .std("c++17")
        .define("USE_C10D_GLOO", None)
        .define("_GLIBCXX_USE_CXX11_ABI", abi.as_str())
        .files(SOURCES)
        .compile("onefold_shims");
}
