# In the place of CMake's module: the header that would be downloaded lies in HEADERS.
function(ExternalProject_Add name)
    add_custom_target(${name})
endfunction()
