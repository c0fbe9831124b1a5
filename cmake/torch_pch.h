// Precompiled once for what writes modules and training loops: tests, examples,
// benchmarks and ddp/.  See c10d_pch.h, which the other folders use.
#include <torch/script.h>
#include <torch/torch.h>

#include "c10d_pch.h"
