// Precompiled header of targets that use modules and optimizers: tests,
// examples, benchmarks and ddp/. Other targets use c10d_pch.h.
#include <torch/script.h>
#include <torch/torch.h>

#include "c10d_pch.h"
