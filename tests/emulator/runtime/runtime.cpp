// All of the runtime, compiled at once: most of the time goes into the standard library's headers.
#include "barriers.cpp"
#include "copies.cpp"
#include "failures.cpp"
#include "matrices.cpp"
#include "scheduler.cpp"
