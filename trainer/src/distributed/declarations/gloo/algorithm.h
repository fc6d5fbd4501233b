// `ProcessGroupGloo.hpp` includes this file of Gloo, but uses none of its declarations.
#pragma once
