// One translation unit for both shims: the headers of libtorch take most of the time to compile.
#include "distributed/c10d.cpp"
#include "shim.cpp"
