// `ProcessGroupGloo.hpp` includes this file of Gloo and uses nothing of it.
#pragma once
