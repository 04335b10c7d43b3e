// What the checks in C++ say of a condition that does not hold, before they return 1.
#pragma once

#include <cstdio>

#define CHECK(condition)                                           \
    do {                                                           \
        if (!(condition)) {                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            return 1;                                              \
        }                                                          \
    } while (0)
