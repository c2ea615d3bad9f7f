// The kernels compute with denormal numbers in every thread, whatever the settings of the caller's thread.
//
// XLA flushes them to zero in the threads that call a kernel, torch does so on demand, and other threads inherit the setting of
// the thread that created them. Results must not depend on which thread computes a task.

#pragma once

#include <cfenv>

// Sets the default floating-point environment until the end of the scope.
struct DenormalNumbers {
    std::fenv_t before;

    DenormalNumbers() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
    ~DenormalNumbers() { std::fesetenv(&before); }
    DenormalNumbers(const DenormalNumbers &) = delete;
    DenormalNumbers &operator=(const DenormalNumbers &) = delete;
};
