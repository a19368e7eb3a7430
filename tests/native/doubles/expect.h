// A check that ends the program with its place and text.
#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                           \
  if (!(condition)) {                                               \
    std::printf("%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                   \
  }
