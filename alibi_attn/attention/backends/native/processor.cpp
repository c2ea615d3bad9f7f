// Which instructions this processor and its system support, for systems that do not list them in a file as Linux does.
//
// A wheel compiles this file without the flags of a level, because it runs before a level is chosen.

#include "system.hpp"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstring>

namespace {

enum Register { EAX, EBX, ECX };
enum State { NONE = 0, YMM = 0x6, ZMM = 0xe6 };  // bits of XCR0: the registers that the system saves

struct Feature {
    const char *name;  // as in /proc/cpuinfo
    unsigned leaf, subleaf;
    Register where;
    int bit;
    State state;
};

constexpr Feature FEATURES[] = {
    {"pni ", 1, 0, ECX, 0, NONE}, {"ssse3 ", 1, 0, ECX, 9, NONE}, {"cx16 ", 1, 0, ECX, 13, NONE},
    {"sse4_1 ", 1, 0, ECX, 19, NONE}, {"sse4_2 ", 1, 0, ECX, 20, NONE}, {"movbe ", 1, 0, ECX, 22, NONE},
    {"popcnt ", 1, 0, ECX, 23, NONE}, {"xsave ", 1, 0, ECX, 26, NONE}, {"lahf_lm ", 0x80000001, 0, ECX, 0, NONE},
    {"abm ", 0x80000001, 0, ECX, 5, NONE}, {"bmi1 ", 7, 0, EBX, 3, NONE}, {"bmi2 ", 7, 0, EBX, 8, NONE},
    {"fma ", 1, 0, ECX, 12, YMM}, {"avx ", 1, 0, ECX, 28, YMM}, {"f16c ", 1, 0, ECX, 29, YMM}, {"avx2 ", 7, 0, EBX, 5, YMM},
    {"avx512f ", 7, 0, EBX, 16, ZMM}, {"avx512dq ", 7, 0, EBX, 17, ZMM}, {"avx512cd ", 7, 0, EBX, 28, ZMM},
    {"avx512bw ", 7, 0, EBX, 30, ZMM}, {"avx512vl ", 7, 0, EBX, 31, ZMM}, {"avx512_bf16 ", 7, 1, EAX, 5, ZMM},
};

unsigned saved_state() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;  // the system uses no XSAVE
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return a;
}

}  // namespace

// Their names, each followed by a space.
EXPORT const char *alibi_processor_features() {
    static char names[256];
    char found[sizeof names] = "";
    const unsigned state = saved_state();
    for (const Feature &feature : FEATURES) {
        unsigned registers[4] = {};
        if (!__get_cpuid_count(feature.leaf, feature.subleaf, registers, registers + 1, registers + 2, registers + 3)) continue;
        if ((registers[feature.where] >> feature.bit & 1) && (state & feature.state) == unsigned(feature.state))
            std::strcat(found, feature.name);
    }
    return std::strcpy(names, found);
}
#elif defined(__APPLE__)
#include <sys/sysctl.h>

// Empty where the system does not know the name, as before macOS 12.
EXPORT const char *alibi_processor_features() {
    int supported = 0;
    size_t size = sizeof supported;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &supported, &size, nullptr, 0) == 0 && supported ? "bf16 " : "";
}
#else
EXPORT const char *alibi_processor_features() { return ""; }
#endif
