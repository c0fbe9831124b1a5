// Whose errors reach the caller of backward as they were thrown.
//
// What a comm hook throws is wrapped into an error that names bucket, iteration
// and rank. A hook that derives from this class, for instance one that calls
// another language and throws its exceptions, is left to speak for itself.

#ifndef BRIGADE_COMM_HOOKS_OWN_ERRORS_H_
#define BRIGADE_COMM_HOOKS_OWN_ERRORS_H_

namespace brigade {

class ThrowsOwnErrors {
 protected:
  virtual ~ThrowsOwnErrors() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_OWN_ERRORS_H_
