// For comm hooks that want to know where iterations begin, and whether their
// buckets will hold gradients.

#ifndef BRIGADE_COMM_HOOKS_ITERATION_LISTENER_H_
#define BRIGADE_COMM_HOOKS_ITERATION_LISTENER_H_

namespace brigade {

class IterationListener {
 public:
  // Called before the first bucket is packed. `has_data`: false on a rank that
  // has run out of data and sends zeros; when such an iteration is over, called
  // with true. Must not communicate: a rank that fails before this sends its
  // zeros without having called it.
  virtual void iteration_begins(bool has_data) = 0;

 protected:
  ~IterationListener() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_ITERATION_LISTENER_H_
