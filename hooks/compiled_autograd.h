// What the reducer's hooks answer the compiler that traces a backward: compiled
// autograd runs a graph of its own, in which hooks of C++ have no place.

#ifndef BRIGADE_HOOKS_COMPILED_AUTOGRAD_H_
#define BRIGADE_HOOKS_COMPILED_AUTOGRAD_H_

namespace brigade {

// Throws RuntimeError that says what to do instead.
[[noreturn]] void refuse_compiled_autograd();

}  // namespace brigade

#endif  // BRIGADE_HOOKS_COMPILED_AUTOGRAD_H_
