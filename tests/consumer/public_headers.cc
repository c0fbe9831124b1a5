// Compiled with more warnings than the library, which are errors.
#include "brigade/brigade.h"
