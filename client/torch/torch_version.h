// Says what differs between the versions of torch that this module can be built for, 2.11 to 2.15.
// Python loads the module that was built for the torch that runs.
#pragma once

#include <torch/version.h>

// Ends the declaration of a function that is virtual in torch's class from 2.14 on.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
#define THALWEG_OVERRIDE_FROM_2_14 override
#else
#define THALWEG_OVERRIDE_FROM_2_14
#endif
