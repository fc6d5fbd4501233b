//! Sets the binary's run-time search path to the libtorch that it was built with, so that it does not need
//! `LD_LIBRARY_PATH`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    let library = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys says where libtorch is");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{library}");
}
