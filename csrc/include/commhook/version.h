// The versions that a library of hooks was built with. load_cpp_hooks() compares them before it
// reads anything else.
#pragma once

// The version of the headers in this folder. Increment it when their declarations change.
#define COMMHOOK_HEADERS_VERSION 1

// Visibility of symbols to other libraries. Most libraries are built with -fvisibility=hidden.
#define COMMHOOK_EXPORT __attribute__((visibility("default")))
#define COMMHOOK_LOCAL __attribute__((visibility("hidden")))
