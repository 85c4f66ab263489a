// What a library of hooks was built with; load_cpp_hooks() compares it before it reads anything.
#pragma once

// Of the headers in this folder. Changes with what they declare.
#define COMMHOOK_HEADERS_VERSION 1

// Symbols that other libraries may see. Most are built with -fvisibility=hidden.
#define COMMHOOK_EXPORT __attribute__((visibility("default")))
#define COMMHOOK_LOCAL __attribute__((visibility("hidden")))
