// The kernels compute with denormal numbers in every thread, whatever the caller's thread does with its own.
//
// XLA flushes them to zero in the threads that call a kernel, torch does so on demand, and a thread of OpenMP has the setting of
// whoever created it: which thread takes a task must not be seen in its results.

#pragma once

#include <cfenv>

// The default floating-point environment, until the end of the scope that it stands in.
struct DenormalNumbers {
    std::fenv_t before;

    DenormalNumbers() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
    ~DenormalNumbers() { std::fesetenv(&before); }
    DenormalNumbers(const DenormalNumbers &) = delete;
    DenormalNumbers &operator=(const DenormalNumbers &) = delete;
};
