// Compiles both shims as one translation unit, because libtorch's headers take most of the compile time.
#include "distributed/c10d.cpp"
#include "shim.cpp"
