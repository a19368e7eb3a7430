// A check that on failure prints its location and text and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                           \
  if (!(condition)) {                                               \
    std::printf("%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                   \
  }
