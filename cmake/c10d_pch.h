// Precompiled once for the library's targets: parsing these headers takes most
// of the time of a translation unit that includes LibTorch.  Holds nothing of
// brigade.  Smaller than torch_pch.h on purpose: what a precompiled header
// leaves to instantiate is paid again in every translation unit (2 s against
// 5).
#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
