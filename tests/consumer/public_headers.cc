// Compiles the public headers with more warnings than the library, as errors.
#include "brigade/brigade.h"
