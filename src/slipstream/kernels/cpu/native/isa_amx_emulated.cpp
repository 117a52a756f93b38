// The unit of AMX with tiles in plain C++, for tests on machines without them.
#define SLIPSTREAM_EMULATE_AMX 1
#include "isa_amx.cpp"
