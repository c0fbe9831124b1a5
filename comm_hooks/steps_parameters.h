// Which comm hooks update parameters, so that these change while backward runs.

#ifndef BRIGADE_COMM_HOOKS_STEPS_PARAMETERS_H_
#define BRIGADE_COMM_HOOKS_STEPS_PARAMETERS_H_

namespace brigade {

class StepsParameters {
 public:
  // Whether it updates any, or a hook that it calls does. Does not change.
  virtual bool steps_parameters() const = 0;

 protected:
  ~StepsParameters() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_STEPS_PARAMETERS_H_
