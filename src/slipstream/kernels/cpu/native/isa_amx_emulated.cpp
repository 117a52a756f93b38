// The AMX unit with tiles emulated in plain C++, for tests on machines without AMX.
#define SLIPSTREAM_EMULATE_AMX 1
#include "isa_amx.cpp"
